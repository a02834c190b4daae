"""Which scale a run is followed on, and growth within a step: by a script of counters and holders."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memtriage.model.units import MIB
from memtriage.session.schedule import microbatch as microbatch_module
from memtriage.session.schedule import scale as scale_module
from support.marked_loops import LOSSES, Loop, Notes, leaking, nothing, taken
from support.simulated import clock, clock_of

# --- within a step ------------------------------------------------------------------------------------------


def within(loop: Loop, values: Sequence[int], held: Sequence[int] | None = None) -> None:
    """A step of some backwards: MiB that the counter shows, and that a list of losses holds, after each."""
    for value, kept in zip(values, held or values, strict=True):
        loop.notes.held = {LOSSES: kept}
        loop.backward(cpu=(100 + value) * MIB)
    loop.step(cpu=(100 + values[-1]) * MIB)


def inside(loop: Loop) -> list[str]:
    return [str(leak.holder) for leak in loop.leaks() if leak.bytes_per_microbatch and leak.holder]


def test_growth_within_the_first_step_is_proven_in_four_censuses() -> None:
    loop = Loop()
    within(loop, range(12))
    (done,) = loop.scheduler.within_steps.done
    assert done.taken == [4, 6, 7, 8]
    assert [growth.proof.certainty for growth in loop.scheduler.within_steps.growths(done)] == ["proven"]
    assert loop.found >= 1


@pytest.mark.parametrize("microbatches", [4, 5, 8, 30])
def test_what_rises_within_every_step_is_a_leak(microbatches: int) -> None:
    loop = Loop()
    for step in range(6):
        within(loop, [step % 3 + value for value in range(microbatches)])
    assert inside(loop) == [LOSSES]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1, 9, 9, 9, 9, 9, 9, 9], id="the first allocates gradients"),
        pytest.param([9, 8, 7, 6, 5, 4, 3, 2], id="falls"),
        pytest.param([5, 1, 5, 1, 5, 1, 5, 1], id="up and down"),
    ],
)
def test_what_does_not_rise_within_a_step_is_left_alone(values: list[int]) -> None:
    loop = Loop()
    within(loop, values)
    assert loop.scheduler.within_steps.done == []
    assert inside(loop) == []


def test_a_cache_that_fills_within_the_first_step_is_cleared() -> None:
    loop = Loop()
    within(loop, [min(value, 11) for value in range(40)])
    assert inside(loop) == []
    loop = Loop()
    within(loop, range(12))
    within(loop, [11] * 12)
    assert inside(loop) == []


@pytest.mark.parametrize("backwards", [2, 3, 5])
def test_stages_within_microbatches_hide_no_leak(backwards: int) -> None:
    loop = Loop()
    within(loop, [100 * (i % backwards) + i for i in range(12 * backwards)], range(12 * backwards))
    first, second, *_ = loop.scheduler.within_steps.done[-1].taken
    assert (second - first) % backwards == 0
    assert inside(loop) == [LOSSES]


def test_a_step_that_ends_early_abandons_its_investigation() -> None:
    loop = Loop()
    within(loop, range(6))
    assert loop.notes.took == [("microbatch", 4), ("microbatch", 6)]
    stopped = loop.notes.stopped
    loop.backward(cpu=100 * MIB)
    assert loop.notes.stopped == stopped + 1
    assert loop.scheduler.within_steps.done == [] and inside(loop) == []


def test_looks_within_steps_are_few() -> None:
    loop = Loop()
    for _ in range(30):
        within(loop, range(20), [5] * 20)  # a pipeline that fills, and nobody holds more
    assert [scale for scale, _ in loop.notes.took].count("microbatch") <= 3 * 4 + 1


def test_slow_looks_within_steps_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(seconds=30)
    for module in (microbatch_module, scale_module):
        monkeypatch.setattr(module, "time", clock(notes))
    loop = Loop(notes)
    for _ in range(20):
        within(loop, range(20), [5] * 20)
    assert [scale for scale, _ in notes.took].count("microbatch") == 4


def test_out_of_memory_ends_the_open_investigation() -> None:
    loop = Loop()
    for value in range(1, 7):
        loop.notes.held = {LOSSES: value}
        loop.backward(cpu=(100 + value) * MIB)
    assert loop.scheduler.within_steps.investigating
    loop.notes.held = {LOSSES: 7}
    loop.scheduler.census(loop.position, ())
    assert loop.notes.took[-1] == ("microbatch", 7)
    assert not loop.scheduler.within_steps.investigating
    assert inside(loop) == [LOSSES]


# --- scales -------------------------------------------------------------------------------------------------


def test_loading_data_for_some_seconds_costs_no_census() -> None:
    loop = Loop()
    loop.notes.held = nothing(0)
    for _ in range(40):
        loop.time(0.1, cpu=100 * MIB)
    loop.train(12, nothing)
    assert {scale for scale, _ in loop.notes.took} == {"step"}


def test_backwards_alone_are_followed_like_steps() -> None:
    loop = Loop()
    for value in range(1, 60):
        loop.notes.held = leaking(value)
        loop.backward(cpu=(100 + value) * MIB)
    assert loop.scheduler.main.scale == "microbatch"
    assert loop.proven() == {LOSSES: MIB}


def test_where_there_are_neither_growth_is_followed_by_time() -> None:
    loop = Loop(Notes(seconds=0))
    with clock_of(loop.notes):
        for mark in range(1, 51):
            loop.notes.held = leaking(mark)
            loop.time(0.1, cpu=(100 + mark) * MIB)
    assert loop.scheduler.main.scale == "second"
    assert loop.proven() == {LOSSES: pytest.approx(10 * MIB, rel=0.01)}


def loaded(notes: Notes, marks: int = 40) -> Loop:
    """A program that has grown by 20 MiB per second, and was not seen to repeat anything."""
    loop = Loop(notes)
    for mark in range(1, 1 + marks):
        notes.held = leaking(mark)
        loop.time(0.05, works=False, cpu=(100 + mark) * MIB)
    return loop


class NothingRecorded(Notes):
    """A program in which no recorder may be started."""

    def record(self, remaining: int, period: float | None = None, *, again: bool = False) -> None:
        raise AssertionError("a recorder of allocation sites was started")


def test_what_loads_and_builds_has_no_census_and_no_recorder() -> None:
    loop = loaded(NothingRecorded())
    assert loop.notes.took == [] and loop.scheduler.main.marks == 40
    loop.train(2, nothing)
    assert loop.notes.took == []


def test_what_never_repeats_is_judged_at_its_end_by_one_census() -> None:
    loop = loaded(NothingRecorded())
    loop.scheduler.main.end(loop.position, None)
    assert taken(loop) == [pytest.approx(2.0)]
    (finding,) = loop.leaks()
    assert (finding.certainty, str(finding.holder)) == ("suspected", LOSSES)
    assert finding.bytes_per_second == pytest.approx(20 * MIB, rel=0.01)


def test_what_no_census_at_the_end_explains_is_not_named() -> None:
    loop = loaded(NothingRecorded())
    loop.notes.held = {"model": 5}
    loop.scheduler.main.end(loop.position, None)
    (finding,) = loop.leaks()
    assert finding.certainty == "suspected" and str(finding.holder).startswith("not named")
    assert "memtriage.step()" in str(finding.fix)


def test_growth_counts_from_when_work_was_seen_to_repeat() -> None:
    loop = loaded(Notes())
    loop.notes.held = nothing(0)
    for _ in range(60):
        loop.time(0.05, cpu=140 * MIB)
    assert loop.scheduler.main.counters["cpu"].estimate().state == "flat"
    loop.scheduler.main.end(loop.position, None)
    assert loop.leaks() == []


def test_time_tells_nothing_once_there_are_steps() -> None:
    loop = Loop()
    for mark in range(40):  # loading and building: memory rises, and no step is to be seen
        loop.notes.held = leaking(mark)
        loop.time(0.5, cpu=(100 + mark) * MIB)
    loop.train(40, nothing)
    assert loop.scheduler.main.scale == "step"
    assert loop.leaks() == []
    before = len(loop.notes.took)
    for mark in range(40):  # within one slow step
        loop.time(0.5, cpu=(100 + mark) * MIB)
    assert len(loop.notes.took) == before


def test_the_rate_of_each_counter_is_known_once_there_is_enough() -> None:
    loop = Loop().train(4, nothing)
    assert loop.scheduler.growing() == {}
    for step in range(60):
        loop.step(**{"cpu": 100 * MIB, "cuda:0": step * MIB, "host": step * MIB, "shared": 0})
    assert loop.scheduler.growing() == {"cpu": 0.0, "cuda:0": pytest.approx(MIB)}
