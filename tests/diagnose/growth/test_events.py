"""Growth belongs to the event whose count explains it best."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from memtriage.diagnose.growth.events import event_of
from memtriage.diagnose.growth.evidence import Comparison
from memtriage.model.findings import Event
from memtriage.model.position import Scale

MIB = 1 << 20
STEPS = 200


def grown(
    bytes_at: Callable[[int], int],
    counts: Mapping[Event, Callable[[int], int]],
    came_with: Mapping[Event, int] | None = None,
    scale: Scale = "step",
    part: float = 1.0,
) -> tuple[Event | None, float]:
    """What a part of a counter's growth comes with, if it and the events were read at each position."""
    comparison = Comparison(scale)
    for at in range(1, STEPS + 1):
        happened = {event: count(at) for event, count in counts.items() if count(at)}
        comparison.read(at, {"cpu": 100 * MIB + bytes_at(at), **happened})
    rate = part * comparison.counters["cpu"].growth.rate
    return event_of(comparison, "cpu", rate, comparison.events, came_with or {})


def test_what_grows_at_each_save_is_of_the_save() -> None:
    event, per_event = grown(lambda at: at // 20 * 8 * MIB, {"save": lambda at: at // 20})
    assert event == "save" and per_event == pytest.approx(8 * MIB, rel=0.05)


def test_a_holder_of_half_of_the_growth_has_half_of_what_comes_with_each_event() -> None:
    _, per_event = grown(lambda at: at // 20 * 8 * MIB, {"save": lambda at: at // 20}, part=0.5)
    assert per_event == pytest.approx(4 * MIB, rel=0.05)


def test_what_grows_at_every_step_is_of_the_step_whatever_else_happens() -> None:
    event, per_event = grown(
        lambda at: at * MIB,
        {"save": lambda at: at // 20, "batch": lambda at: at, "epoch": lambda at: at // 50},
    )
    assert event == "step" and per_event == pytest.approx(MIB, rel=0.01)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_batch_at_each_step_is_a_step_however_far_the_loader_is_ahead(ahead: int) -> None:
    noise = random.Random(0)
    extra = [noise.randrange(MIB) for _ in range(STEPS + 1)]  # what a step leaves until the next one
    event, per_event = grown(lambda at: at * MIB + extra[at], {"batch": lambda at: at + ahead})
    assert event == "step" and per_event == pytest.approx(MIB, rel=0.05)


def test_saves_at_uneven_distances_explain_uneven_rises() -> None:
    saves = (20, 30, 70, 85, 120, 160, 190)
    event, per_event = grown(
        lambda at: sum(at >= save for save in saves) * 8 * MIB,
        {"save": lambda at: sum(at >= save for save in saves), "evaluation": lambda at: at // 25},
    )
    assert event == "save" and per_event == pytest.approx(8 * MIB, rel=0.1)


@pytest.mark.parametrize("event", ["save", "evaluation"])
def test_of_two_events_at_the_same_steps_the_one_during_which_memory_came_counts(event: Event) -> None:
    found, _ = grown(
        lambda at: at // 20 * 8 * MIB,
        {"save": lambda at: at // 20, "evaluation": lambda at: at // 20},
        {event: 80 * MIB},
    )
    assert found == event


def test_over_time_batches_explain_growth_as_well_as_seconds_and_are_named() -> None:
    event, per_event = grown(lambda at: at * MIB, {"batch": lambda at: 4 * at}, scale="second")
    assert event == "batch" and per_event == pytest.approx(MIB / 4, rel=0.01)


@pytest.mark.parametrize("seed", range(12))
def test_batches_are_named_where_noise_makes_them_explain_growth_a_little_worse(seed: int) -> None:
    noise = random.Random(seed)
    event, _ = grown(
        lambda at: 37 * at // 10 * MIB + round(noise.gauss(0, 3 * MIB)),
        {"batch": lambda at: 37 * at // 10},
        scale="second",
    )
    assert event == "batch"


def test_over_time_nothing_is_named_where_nothing_was_counted() -> None:
    assert grown(lambda at: at * MIB, {}, scale="second")[0] is None
