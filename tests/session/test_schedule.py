"""When censuses are taken: followed by a script of counters, with an investigator that takes notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.leaks import CensusPoint
from memtriage.model.census import Census, HolderGroup
from memtriage.model.paths import in_words
from memtriage.model.position import TrainingPosition
from memtriage.session.investigation import HostGrowth, Investigation, Investigator
from memtriage.session.schedule.policy import SCHEDULE
from memtriage.session.schedule.scheduler import CensusScheduler
from support.paths import named

MIB = 1 << 20
LOOK: Any = object()  # what the session asks of a view; handed through


class Notes:
    """Stands in for an `Investigator`: notes what is asked of it, and answers with `kept` storages."""

    def __init__(self, kept: Callable[[int], int], seconds: float = 0.1, host: bool = False) -> None:
        self.seconds = 0.0
        self.log: list[tuple[str, int]] = []
        self.looks: list[object] = []
        self.recorded: list[int] = []
        self._kept = kept
        self._anchor = "losses[*]"
        self._each_s = seconds
        self._host = host
        self._at = 0

    def census(self, position: int, also: object = None, frames: object = None) -> CensusPoint:
        self.log.append(("census", position))
        self.looks.append(also)
        return self._point(position)

    def begin(self, scale: str, position: int) -> Investigation:
        self.log.append((f"begin {scale}", position))
        return Investigation(cast(Any, scale), [self._point(position)])

    def record(self, remaining: int) -> None:
        self.recorded.append(remaining)

    def conclude(
        self, investigation: Investigation, position: int, also: object = None, frames: object = None
    ) -> CensusPoint:
        self.log.append(("conclude", position))
        self.looks.append(also)
        investigation.points.append(self._point(position))
        if self._host:
            investigation.host.append(HostGrowth(named("train.texts[*]"), "list", MIB, 4, None))
        return investigation.points[-1]

    def stop(self) -> None:
        self.log.append(("stop", self._at))

    def _point(self, position: int) -> CensusPoint:
        self.seconds += self._each_s
        count = self._kept(position)
        path = named(self._anchor)
        groups = [
            HolderGroup(
                device="cpu", anchor=path, path=path, count=count, nbytes=count * MIB,
                tails={path: count * MIB}, owners={"variable": count * MIB}, attached=False,
            )
        ]  # fmt: skip
        census = Census(
            storages=[], groups=groups if count else [], nodes_by_anchor={}, objects=0, nodes=0, seconds=0.0
        )
        return CensusPoint(position, census)


class Loop:
    """A training loop that marks as a session does. A step takes `step_s` seconds."""

    def __init__(self, notes: Notes, step_s: float = 1.0) -> None:
        self.notes = notes
        self.found = 0
        self.scheduler = CensusScheduler(cast(Investigator, notes), LOOK, self._count)
        self.steps = 0
        self.microbatch = 0
        self.usual = 0
        self.now_s = 0.0
        self._step_s = step_s
        self._stepped = False

    def _count(self) -> None:
        self.found += 1

    @property
    def position(self) -> TrainingPosition:
        return TrainingPosition(
            step=self.steps, microbatch=self.microbatch, microbatches_per_step=self.usual, time_s=self.now_s
        )

    def backward(self, **counters: int) -> None:
        if self._stepped:
            self.microbatch = 0
            self._stepped = False
        self.microbatch += 1
        self.notes._at = self.microbatch
        self.scheduler.at_mark("backward", self.position, counters)

    def step(self, **counters: int) -> None:
        self.steps += 1
        self.now_s += self._step_s
        self.usual, self._stepped = self.microbatch, True
        self.notes._at = self.steps
        self.scheduler.at_mark("step", self.position, counters)

    def train(self, values: Sequence[int], microbatches: int = 1) -> None:
        """One step for each value, which stands still inside the step."""
        for value in values:
            for _ in range(microbatches):
                self.backward(cpu=value)
            self.step(cpu=value)

    def time(self, seconds: int, **counters: int) -> None:
        self.now_s += seconds
        self.scheduler.at_mark("time", self.position, counters)


def leaking(step: int) -> int:
    return step


def nothing(step: int) -> int:
    return 0


def rising(steps: int, rate: int = MIB, first: int = 0) -> list[int]:
    return [100 * MIB + (first + step) * rate for step in range(steps)]


def leaks(loop: Loop) -> list[str]:
    return [in_words(growth.group.anchor) for done in loop.scheduler.done for growth in done.growths()]


# --- from step to step --------------------------------------------------------------------------------------


def test_a_flat_run_takes_one_census_at_the_third_step() -> None:
    notes = Notes(nothing)
    Loop(notes).train([100 * MIB] * 300)
    assert notes.log == [("census", SCHEDULE.baseline_step)]
    assert notes.looks == [LOOK]


def test_a_leak_is_followed_by_three_censuses_and_no_more() -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    loop.train(rising(40))
    first = notes.log[1][1]
    assert 8 <= first <= 10
    assert notes.log == [
        ("census", SCHEDULE.baseline_step),
        ("begin step", first),
        ("conclude", first + 4),
        ("census", first + 12),
    ]
    assert notes.recorded == [4, 3, 2, 1]
    (done,) = loop.scheduler.done
    assert [point.position for point in done.points] == [first, first + 4, first + 12]
    assert done.baseline is loop.scheduler.steps.baseline is not None
    (growth,) = done.growths()
    assert growth.rate == MIB
    assert loop.found == 2


def test_a_long_run_that_still_grows_is_followed_again_at_twice_the_length() -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    loop.train(rising(1000))
    begun = [step for name, step in notes.log if name == "begin step"]
    seen = [done.points[-1].position for done in loop.scheduler.done]
    assert 4 <= len(begun) <= 7
    assert all(later >= 2 * last for later, last in zip(begun[1:], seen, strict=False))
    assert all(done.growths() for done in loop.scheduler.done)


def test_what_grew_first_is_cleared_when_it_is_something_else_that_grows() -> None:
    class Two(Notes):
        """A cache that fills until step 17, and then a list that grows."""

        def _point(self, position: int) -> CensusPoint:
            self._anchor = "cache[*]"
            cache = super()._point(min(position, 17))
            self._anchor = "losses[*]"
            later = super()._point(max(0, position - 36))
            groups = cache.census.groups + later.census.groups
            return CensusPoint(position, msgspec.structs.replace(cache.census, groups=groups))

    loop = Loop(Two(nothing))
    loop.notes._kept = leaking
    loop.train([(100 + min(step, 17) + max(0, step - 36)) * MIB for step in range(1, 36)])
    assert leaks(loop) == ["cache[*]"]
    loop.train([(100 + 17 + max(0, step - 36)) * MIB for step in range(36, 80)])
    assert leaks(loop) == ["losses[*]"]


def test_what_stopped_growing_is_cleared_by_the_third_census() -> None:
    notes = Notes(lambda step: min(step, 13))
    loop = Loop(notes)
    loop.train([100 * MIB + min(step, 13) * MIB for step in range(100)])
    assert [name for name, _ in notes.log] == ["census", "begin step", "conclude", "census"]
    assert loop.scheduler.done[0].growths() == []


def test_a_leak_that_begins_after_a_cache_has_filled_is_followed_too() -> None:
    notes = Notes(lambda step: min(step, 13) + max(0, step - 100))
    loop = Loop(notes)
    loop.train([100 * MIB + notes._kept(step + 1) * MIB for step in range(300)])
    assert [name for name, _ in notes.log].count("begin step") == 2
    assert loop.scheduler.done[-1].growths()


def test_a_slow_third_census_is_not_taken() -> None:
    notes = Notes(leaking, seconds=16.0)
    Loop(notes).train(rising(25))
    assert [name for name, _ in notes.log] == ["census", "begin step", "conclude"]


def test_after_a_false_alarm_it_is_quiet_for_a_while() -> None:
    notes = Notes(nothing, seconds=1.0)
    loop = Loop(notes)
    loop.train(rising(20))
    alarm = [("census", 3), *notes.log[1:]]
    assert [name for name, _ in alarm] == ["census", "begin step", "conclude"]
    assert loop.found == 0
    # Three seconds of censuses are a hundredth of 300; a quarter of that is waited.
    loop.train(rising(54, first=20))
    assert notes.log == alarm
    loop.train(rising(200, first=74))
    later = [step for name, step in notes.log[3:] if name == "begin step"]
    assert later and later[0] >= 75


def test_one_counter_that_grows_is_enough() -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    for step in range(12):
        loop.step(**{"cpu": 5 * MIB, "cuda:0": step * MIB, "shared": MIB})
    assert ("begin step", 9) in notes.log
    assert set(loop.scheduler.steps.series) == {"cpu", "cuda:0", "shared"}


def test_growth_of_other_memory_is_found_too() -> None:
    notes = Notes(nothing, host=True)
    loop = Loop(notes)
    loop.train(rising(16))
    assert loop.found >= 1
    assert loop.scheduler.done[0].host


@given(
    st.lists(st.integers(0, 1 << 34), min_size=1, max_size=4),
    st.integers(6, 150),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_a_flat_or_periodic_counter_never_starts_an_investigation(
    pattern: list[int], steps: int, microbatches: int, odd: int
) -> None:
    notes = Notes(leaking)
    warm_up = [value + odd * MIB for value in range(odd)]
    Loop(notes).train([*warm_up, *(pattern[i % len(pattern)] for i in range(steps))][:steps], microbatches)
    assert notes.log == [("census", SCHEDULE.baseline_step)]


@given(st.lists(st.integers(0, 1 << 20), min_size=5, max_size=100), st.integers(1, 4))
def test_a_falling_counter_never_starts_an_investigation(falls: list[int], microbatches: int) -> None:
    values = [(1 << 40) - sum(falls[:i]) for i in range(len(falls))]
    notes = Notes(leaking)
    Loop(notes).train(values, microbatches)
    assert notes.log == [("census", SCHEDULE.baseline_step)]


@given(st.integers(16 * 1024, 1 << 30), st.integers(1, 3), st.integers(30, 41))
def test_steady_growth_is_always_followed_to_its_end(rate: int, microbatches: int, steps: int) -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    loop.train(rising(steps, rate), microbatches)
    assert [name for name, _ in notes.log] == ["census", "begin step", "conclude", "census"]


# --- within a step ------------------------------------------------------------------------------------------


def test_growth_within_the_first_step_is_followed_at_four_and_concluded_by_eight() -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    for microbatch in range(1, 9):
        loop.backward(cpu=microbatch * MIB)
    assert notes.log == [("begin microbatch", 4), ("conclude", 8)]
    (done,) = loop.scheduler.done
    assert done.scale == "microbatch" and done.baseline is None
    assert done.growths()[0].rate == MIB
    assert loop.found == 1


@pytest.mark.parametrize(
    ("microbatches", "begin", "conclude"), [(4, 2, 4), (5, 2, 5), (6, 4, 6), (7, 4, 7), (8, 4, 8), (30, 4, 8)]
)
def test_short_steps_are_followed_within_their_length(microbatches: int, begin: int, conclude: int) -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    loop.train([0], microbatches)
    for _ in range(2):
        for microbatch in range(1, microbatches + 1):
            loop.backward(cpu=microbatch * MIB)
        loop.step(cpu=0)
    assert [each for each in notes.log if each[0] != "census"] == [
        ("begin microbatch", begin),
        ("conclude", conclude),
    ]
    assert loop.scheduler.done[-1].growths()


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_steps_of_up_to_three_micro_batches_are_judged_as_a_whole(microbatches: int) -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    for _ in range(40):
        for microbatch in range(1, microbatches + 1):
            loop.backward(cpu=microbatch * MIB)
        loop.step(cpu=0)
    assert notes.log == [("census", SCHEDULE.baseline_step)]


@pytest.mark.parametrize(
    "values",
    [
        [1, 9, 9, 9, 9, 9, 9, 9],  # the first allocates gradients
        [1, 2, 3, 3, 3, 3, 2, 1],  # a pipeline that fills and drains
        [9, 8, 7, 6, 5, 4, 3, 2],
    ],
)
def test_what_stops_rising_within_a_step_is_left_alone(values: list[int]) -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    for value in values:
        loop.backward(cpu=value * MIB)
    assert notes.log == []


def within(loop: Loop, values: Sequence[int]) -> None:
    for value in values:
        loop.backward(cpu=value * MIB)
    loop.step(cpu=values[-1] * MIB)


def test_a_cache_that_fills_within_the_first_step_is_cleared_by_the_second() -> None:
    loop = Loop(Notes(leaking))
    within(loop, range(12))
    assert leaks(loop) == ["losses[*]"]
    within(loop, [12] * 12)
    assert leaks(loop) == []


def test_a_cache_that_fills_within_the_first_step_is_cleared_at_its_end() -> None:
    loop = Loop(Notes(leaking))
    within(loop, [min(value, 9) for value in range(30)])
    assert leaks(loop) == []


@pytest.mark.parametrize("microbatches", [4, 5, 8, 30])
def test_what_rises_within_every_step_stays_a_leak(microbatches: int) -> None:
    loop = Loop(Notes(leaking))
    for step in range(12):
        within(loop, [step % 3 + value for value in range(microbatches)])
    assert leaks(loop) == ["losses[*]"]


@pytest.mark.parametrize("backwards", [2, 3, 5, 7])
def test_stages_that_go_up_and_down_within_each_micro_batch_hide_no_leak(backwards: int) -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    within(loop, [100 * (i % backwards) + i for i in range(8 * backwards)])
    # Up to three stages' rises look like micro-batches' at first.
    *_, (_, first), (_, second) = notes.log
    assert (second - first) % backwards == 0
    assert leaks(loop) == ["losses[*]"]


def test_a_shorter_step_clears_nobody() -> None:
    loop = Loop(Notes(leaking))
    within(loop, range(12))
    within(loop, [3, 3, 3])
    assert leaks(loop) == ["losses[*]"]


@pytest.mark.parametrize("usual", [0, 12])
def test_a_step_that_ends_early_abandons_its_investigation(usual: int) -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    if usual:
        loop.train([MIB], usual)
    for microbatch in range(1, 7):
        loop.backward(cpu=microbatch * MIB)
    loop.step(cpu=MIB)
    assert notes.log == [("begin microbatch", 4)]
    loop.backward(cpu=MIB)
    assert notes.log == [("begin microbatch", 4), ("stop", 1)]
    assert loop.scheduler.done == [] and loop.found == 0


def test_a_leak_within_a_step_is_followed_once() -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    for _ in range(4):
        for microbatch in range(1, 41):
            loop.backward(cpu=microbatch * MIB)
        loop.step(cpu=MIB)
    assert [name for name, _ in notes.log] == ["begin microbatch", "conclude", "census"]


def test_three_tries_within_steps_are_enough() -> None:
    notes = Notes(nothing, seconds=0.0)
    loop = Loop(notes)
    for _ in range(20):
        for microbatch in range(1, 11):
            loop.backward(cpu=microbatch * MIB)
        loop.step(cpu=MIB)
    assert [name for name, _ in notes.log].count("begin microbatch") == 3


def test_one_investigation_at_a_time() -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    for step in range(40):
        for microbatch in range(1, 11):
            loop.backward(cpu=(100 * step + microbatch) * MIB)
        loop.step(cpu=100 * step * MIB)
    under_way = 0
    for name, _ in notes.log:
        under_way += name.startswith("begin") - (name in ("conclude", "stop"))
        assert under_way in (0, 1)
    assert {investigation.scale for investigation in loop.scheduler.done} == {"step", "microbatch"}


# --- by time ------------------------------------------------------------------------------------------------


def test_where_no_steps_are_seen_growth_is_followed_by_time() -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    for mark in range(16):
        loop.time(5, cpu=mark * MIB)
    (begin, conclude) = notes.log
    assert begin[0] == "begin second"
    assert conclude[0] == "conclude" and conclude[1] >= begin[1] + 8
    assert loop.scheduler.done[0].scale == "second"


def test_a_flat_program_without_steps_takes_no_census() -> None:
    notes = Notes(nothing)
    loop = Loop(notes)
    for _ in range(100):
        loop.time(5, cpu=7 * MIB)
    assert notes.log == []


def test_time_tells_nothing_once_there_are_steps() -> None:
    notes = Notes(leaking)
    loop = Loop(notes)
    for mark in range(20):  # loading and building: memory rises, and no step is to be seen
        loop.time(5, cpu=mark * MIB)
    assert loop.scheduler.done
    loop.train([100 * MIB])
    assert not loop.scheduler.done
    taken = len(notes.log)
    for mark in range(40):  # within one slow step
        loop.time(5, cpu=(100 + mark) * MIB)
    assert len(notes.log) == taken
    assert not loop.scheduler.done


# --- the end ------------------------------------------------------------------------------------------------


def followed(steps: int) -> Loop:
    loop = Loop(Notes(leaking))
    loop.train(rising(steps))
    return loop


def test_at_the_end_a_suspicion_under_way_is_concluded() -> None:
    loop = followed(11)
    loop.scheduler.end(loop.position)
    assert loop.notes.log[-1] == ("conclude", 11)
    assert loop.scheduler.done[0].growths()


def test_an_exception_concludes_it_by_what_its_frames_still_hold() -> None:
    loop = followed(11)
    loop.scheduler.end(loop.position, [])
    assert loop.notes.log[-1] == ("conclude", 11)
    assert loop.notes.looks[-1] is LOOK


def test_at_the_very_step_of_the_first_census_there_is_nothing_to_compare() -> None:
    loop = followed(9)
    loop.scheduler.end(loop.position)
    assert loop.notes.log[-2:] == [("begin step", 9), ("stop", 9)]
    assert loop.scheduler.done == []


def test_without_a_suspicion_the_end_costs_nothing() -> None:
    loop = Loop(Notes(nothing))
    loop.train([MIB] * 30)
    loop.scheduler.end(loop.position)
    loop.scheduler.abandon()
    assert loop.notes.log == [("census", SCHEDULE.baseline_step)]


def test_running_out_of_memory_concludes_what_was_under_way() -> None:
    loop = followed(11)
    point = loop.scheduler.interrupted(loop.position, ())
    assert loop.notes.log[-1] == ("conclude", 11)
    assert loop.notes.looks[-1] is LOOK
    assert loop.scheduler.done[0].points[-1] is point


def test_running_out_of_memory_takes_a_census_of_its_own_otherwise() -> None:
    loop = Loop(Notes(nothing))
    loop.train([MIB] * 2)
    loop.scheduler.interrupted(loop.position, ())
    assert loop.notes.log == [("census", 2)]
    assert loop.notes.looks == [LOOK]
