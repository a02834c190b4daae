"""What a judgment rests on: a limit where nothing grows, a reason where nothing can be said."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from memtriage.diagnose.growth.judged import (
    judge_counter,
    stated_limit,
    weakest,
    with_circumstances,
    with_limit,
)
from memtriage.diagnose.growth.track import Track
from memtriage.diagnose.growth.trend import TrendPolicy, trend_policy
from memtriage.model.judged import DetectionLimit, Judged, JudgedScale

CPU = trend_policy("cpu")
MIB = 1024**2


def judged(
    value: Callable[[int], float],
    steps: int,
    scale: JudgedScale = "step",
    policy: TrendPolicy = CPU,
    unit: float = 1,
) -> tuple[str, Judged]:
    track = Track(policy.warm_up)
    for step in range(steps):
        track.add(step * unit, int(value(step)))
    found, said = judge_counter(track, scale, policy)
    return found.state, said


@pytest.mark.parametrize(
    ("steps", "scale", "count"),
    [
        (0, "step", "0 steps are too few"),
        (1, "step", "1 step is too few"),
        (11, "microbatch", "11 backwards are too few"),
        (5, "time", "no step was seen"),
    ],
)
def test_too_few_positions_are_the_reason(steps: int, scale: JudgedScale, count: str) -> None:
    state, said = judged(lambda step: step * MIB, steps, scale)
    assert state == "too_short"
    assert (said.scale, said.points, said.detection_limit) == (scale, steps, None)
    assert said.reason is not None
    assert count in said.reason
    assert re.search("12 (steps, .* )?are needed", said.reason)


def test_a_flat_counter_has_a_limit_and_no_reason() -> None:
    state, said = judged(lambda step: 7, 312)
    assert (state, said.reason, said.points) == ("flat", None, 312)
    assert said.detection_limit is not None
    assert said.detection_limit.per == "step"
    assert CPU.least <= said.detection_limit.bytes <= 4 * 1024


@pytest.mark.parametrize(("limit", "stated"), [(190 * MIB, None), (MIB + 0.5, MIB + 1), (None, None)])
def test_a_limit_of_many_times_the_memory_in_use_means_nothing(
    limit: float | None, stated: int | None
) -> None:
    track = Track()
    for second in range(30):
        track.add(second, 200 * MIB)
    suspected = Judged(scale="time", points=30, reason="suspected growth")
    said = with_limit(suspected, limit, track.points())
    assert (None if said.detection_limit is None else said.detection_limit.bytes) == stated
    assert (said.reason is None) == (stated is not None)


def test_three_seconds_at_tenths_of_a_second_are_enough() -> None:
    state, said = judged(lambda step: 7, 30, "time", unit=0.1)
    assert state == "flat"
    assert said.detection_limit is not None
    assert said.detection_limit.per == "second"
    assert judged(lambda step: step * MIB, 30, "time", unit=0.1)[0] == "growing"


def test_growth_of_less_than_a_second_may_settle() -> None:
    """A cache of 1.3 MB/s, followed for a third of a second: no limit above its own growth is stated."""
    state, said = judged(lambda step: step * 40_000, 14, "time", unit=0.03)
    assert (state, said.detection_limit) == ("undecided", None)
    assert said.reason is not None
    assert said.reason.startswith("suspected growth of 1.3 MiB per second")
    assert judged(lambda step: 7 + step % 3 * 40_000, 14, "time", unit=0.03)[0] == "flat"


def test_a_growing_counter_has_neither_limit_nor_reason() -> None:
    assert judged(lambda step: step * MIB, 30) == ("growing", Judged(scale="step", points=30))


def test_undecided_growth_says_its_rate() -> None:
    state, said = judged(lambda step: 1e9 * (1 - 2 ** (-step / 100)), 300)
    assert state == "undecided"
    assert said.detection_limit is None
    assert said.reason is not None
    assert said.reason.startswith("suspected growth of ")
    assert "per step" in said.reason


def test_a_limit_is_never_rounded_down() -> None:
    _, said = judged(lambda step: 7, 3_000)
    assert isinstance(said.detection_limit, DetectionLimit)
    assert said.detection_limit.bytes >= CPU.least


@pytest.mark.parametrize(("in_use", "meant"), [(10 * MIB, False), (400 * MIB, True)])
def test_a_limit_far_above_all_memory_in_use_is_none(in_use: int, meant: bool) -> None:
    """In 1.3 s, only a leak of 1.8 GB would be seen among blocks of up to 120 MiB."""
    chance = random.Random(0)
    state, said = judged(lambda step: in_use + chance.randrange(120 * MIB), 14, "time", unit=0.1)
    assert (state, said.detection_limit is not None) == ("flat", meant)
    assert (said.reason is None) is meant


SHORT = Judged(scale="step", points=3, reason="3 steps are too few, 12 are needed")


def flat(limit: int, scale: JudgedScale = "step") -> Judged:
    return Judged(scale=scale, points=40, detection_limit=DetectionLimit(limit, "step"))


def test_the_weakest_of_several_ranks_says_least() -> None:
    assert weakest([flat(512), flat(4096), flat(1024)]) == flat(4096)
    assert weakest([flat(4096), Judged(scale="step", points=30), flat(512)]) == Judged(
        scale="step", points=30
    )
    assert weakest([flat(4096), SHORT, Judged(scale="step", points=30)]) == SHORT


def test_a_limit_in_words_rests_on_steps_backwards_or_time() -> None:
    assert stated_limit({"cpu": flat(1434)}, steps=312, seconds=9.0) == (
        "no growth above 1.4 KiB per step on cpu in 312 steps"
    )
    assert stated_limit({"cpu": flat(1434, "microbatch")}, steps=0, seconds=9.0) == (
        "no growth above 1.4 KiB per step on cpu in 40 backwards"
    )
    slow = Judged(scale="time", points=40, detection_limit=DetectionLimit(2048, "second"))
    assert stated_limit({"cpu": slow}, steps=0, seconds=64.0) == (
        "no growth above 2.0 KiB per second on cpu in 1 min 04 s"
    )
    assert stated_limit({"cpu": slow}, steps=0, seconds=None) == (
        "no growth above 2.0 KiB per second on cpu in 40 readings"
    )
    assert stated_limit({"cpu": SHORT}, steps=3, seconds=9.0) is None


@pytest.mark.parametrize(
    ("failed", "steps", "torch", "expected"),
    [
        (True, 0, True, "the script failed at once: 3 steps"),
        (True, 3, True, "the script failed after 3 steps: 3 steps"),
        (False, 0, False, "torch was not imported: 3 steps"),
        (False, 3, True, "3 steps"),
        (False, 3, False, "3 steps"),  # counted by `memtriage.step()`
    ],
)
def test_a_short_run_says_how_it_came_to_be_short(
    failed: bool, steps: int, torch: bool, expected: str
) -> None:
    judged = {"cpu": SHORT, "cuda:0": flat(512)}
    said = with_circumstances(judged, failed=failed, steps=steps, torch=torch)
    assert said["cpu"].reason == f"{expected} are too few, 12 are needed"
    assert said["cuda:0"] == flat(512)


def test_what_was_long_enough_keeps_its_reason() -> None:
    noisy = {"cpu": Judged(scale="step", points=30, reason="it moves"), "cuda:0": Judged(reason="no counter")}
    assert with_circumstances(noisy, failed=True, steps=30, torch=False) == noisy
