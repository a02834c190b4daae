"""When censuses are taken, and what comes of them: followed by a script of counters and holders."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from memtriage.diagnose.growth.attribution import attribute
from memtriage.model.census import HolderGroup
from memtriage.model.position import TrainingPosition
from memtriage.model.units import MIB
from memtriage.session.schedule import scheduler as scheduler_module
from memtriage.session.schedule.investigation import Following
from support.censuses import group
from support.marked_loops import LOOK, LOSSES, Loop, Notes, leaking, nothing, taken

# --- from step to step --------------------------------------------------------------------------------------


def test_healthy_run_has_few_censuses_and_no_recording() -> None:
    loop = Loop().train(300, nothing)
    assert taken(loop) == [3, 12, 48, 192]
    assert loop.notes.looks == [LOOK] * 4
    assert loop.notes.recorded == [] and loop.found == 0
    assert loop.leaks() == []


def test_growing_holder_is_proven_within_twenty_steps() -> None:
    loop = Loop().train(24, leaking)
    assert loop.proven() == {LOSSES: MIB}
    assert not any(within_step for within_step, _ in loop.notes.took)


def test_sites_are_recorded_before_a_census_of_a_suspicion() -> None:
    loop = Loop().train(24, leaking)
    assert {1, 2} <= set(loop.notes.recorded)


def test_gradients_that_are_no_micro_batch_are_followed_over_the_run() -> None:
    loop = Loop()
    for number in range(1, 41):
        loop.notes.held = {LOSSES: number}
        position = TrainingPosition(backwards=number, time_s=number)  # as torch.autograd.grad counts them
        loop.scheduler.at_mark("backward", position, {"cpu": (100 + number) * MIB})
    assert loop.proven() == {LOSSES: MIB}
    assert not any(within_step for within_step, _ in loop.notes.took)


def test_recorders_do_not_stay_on_where_the_census_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    while loop.steps < 40 and (not loop.notes.recorded or loop.notes.recorded[-1] != 1):
        loop.train(1, leaking)
    stopped = loop.notes.stopped
    monkeypatch.setattr(scheduler_module, "affordable", lambda *_, **__: False)
    loop.train(1, leaking)
    assert loop.notes.stopped == stopped + 1
    asked = len(loop.notes.recorded)
    loop.train(20, leaking)
    assert (loop.notes.stopped, len(loop.notes.recorded)) == (stopped + 1, asked)


@pytest.mark.parametrize("period", [10, 50])
def test_what_grows_every_so_many_steps_is_found(period: int) -> None:
    loop = Loop().train(12 * period, lambda step: {"epochs[*]": 1 + step // period})
    (rate,) = loop.proven().values()
    assert rate == pytest.approx(MIB / period, rel=0.2)
    (finding,) = loop.leaks()
    assert finding.evidence[0] == f"it grows by 1.0 MiB at a time, every {period} steps"


@pytest.mark.parametrize(
    ("bound", "steps"), [(5, 90), (15, 150), (60, 420), (45, 60), (50, 100), (100, 140), (200, 300)]
)
def test_what_fills_and_stops_is_no_leak(bound: int, steps: int) -> None:
    loop = Loop().train(steps, lambda step: {"cache[*]": min(step, bound)})
    assert loop.proven() == {}
    assert len(loop.notes.took) <= 20


def test_a_counter_s_noise_hides_no_slow_growth() -> None:
    chance = random.Random(3)
    loop = Loop().train(700, lambda step: {"batch": chance.randrange(10), LOSSES: step // 5})
    assert loop.proven()[LOSSES] == pytest.approx(MIB / 5, rel=0.2)


def test_holders_that_come_and_go_are_no_leak_under_noise() -> None:
    chance = random.Random(3)
    loop = Loop().train(300, lambda step: {"batch[*]": chance.randrange(1, 40)})
    assert loop.leaks() == []
    assert len(loop.notes.took) <= 12


def test_growth_after_the_last_census_is_not_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is emptied while early censuses hold the program up, and later gets longer."""
    loop = Loop().train(30, lambda step: {"model": 50, "jobs[*]": 1})
    loop.scheduler.census(loop.position)
    monkeypatch.setattr(scheduler_module, "affordable", lambda *args, **options: False)
    loop.train(60, lambda step: {"model": 50, "jobs[*]": step - 29})
    assert [leak.certainty for leak in loop.leaks()] == ["suspected"]
    loop.scheduler.end(loop.position, None)
    assert {leak.holder for leak in loop.leaks()} == {"jobs[*]"}


def test_all_of_libraries_is_searched_only_where_sure_growth_has_no_holder() -> None:
    unnamed = Loop().train(60, nothing, malloc=lambda step: step)
    named, flat = Loop().train(60, leaking), Loop().train(60, nothing)
    asked = unnamed.notes.libraries
    assert asked[:2] == [False, False] and asked[-1]
    assert asked == sorted(asked)  # from then on at each census: what grows is compared with the one before
    assert not any(named.notes.libraries) and not any(flat.notes.libraries)


def test_each_change_of_what_is_known_is_passed_on() -> None:
    loop, before = Loop(), 0
    while not loop.proven():
        before = loop.found
        loop.train(1, leaking)
    assert loop.found > before  # as soon as it is proven


def test_a_false_alarm_leaves_enough_for_a_leak_later_in_the_run(slow: Loop) -> None:
    loop = slow.train(30, lambda step: {"warm_up[*]": min(step, 15)})
    loop.train(400, lambda step: {"warm_up[*]": 15, LOSSES: max(0, step - 150)})
    assert loop.proven()[LOSSES] == pytest.approx(MIB, rel=0.2)


def test_data_that_begins_late_is_found_by_the_resident_set() -> None:
    loop = Loop()
    loop.notes.held = nothing(0)
    for step in range(1, 400):
        loop.notes.texts = 1 + 16 * max(0, step - 110)
        loop.step(cpu=100 * MIB, host=(500 + max(0, step - 110)) * MIB)
    assert loop.proven()["train.texts[*]"] == pytest.approx(MIB, rel=0.2)


# --- cost ---------------------------------------------------------------------------------------------------


@pytest.fixture
def slow() -> Loop:
    """A program in which each census takes half a minute."""
    return Loop(Notes(seconds=30))


def test_slow_censuses_settle_a_suspicion_all_the_same(slow: Loop) -> None:
    loop = slow.train(300, leaking)
    assert loop.proven() == {LOSSES: MIB}
    assert len(loop.notes.took) <= 8


def test_slow_censuses_leave_the_program_time(slow: Loop) -> None:
    loop = slow
    for mark in range(1, 401):
        loop.notes.held = leaking(mark)
        before = loop.notes.paused_s
        loop.time(0.5, cpu=(100 + mark) * MIB)
        loop.now_s += loop.notes.paused_s - before  # the program waited
    assert loop.proven() == {LOSSES: 2 * MIB}
    assert len(taken(loop)) <= 4  # of half a minute each, in 200 seconds of its own


def test_a_census_that_fails_is_not_tried_at_every_mark() -> None:
    loop = Loop()
    loop.notes.fails = True
    failed = 0
    for step in range(1, 101):
        loop.notes.held = leaking(step)
        try:
            loop.step(cpu=(100 + step) * MIB)
        except MemoryError:
            failed += 1
    assert 1 <= failed <= 30
    loop.notes.fails = False
    loop.train(200, leaking)
    assert loop.proven() == {LOSSES: MIB}


# --- the end, and memory that runs out ----------------------------------------------------------------------


def suspected() -> Loop:
    """A run that is suspected of a leak that is not proven yet."""
    loop = Loop()
    while loop.steps < 40 and not loop.notes.recorded:  # for the census that is to prove it
        loop.train(1, leaking)
    return loop


@pytest.mark.parametrize("frames", [None, []])
def test_at_the_end_a_suspicion_is_looked_at_once_more(frames: list[Any] | None) -> None:
    loop = suspected()
    before = len(loop.notes.took)
    loop.scheduler.end(loop.position, frames)
    assert taken(loop)[before:] == [loop.steps]
    assert loop.notes.between[-1] is False
    assert LOSSES in {leak.holder for leak in loop.leaks()}


def test_what_is_gone_at_the_end_is_still_growth() -> None:
    loop = suspected()
    loop.notes.held = {}
    loop.scheduler.end(loop.position, None)
    (leak,) = loop.leaks()
    assert leak.bytes_per_step == pytest.approx(MIB, rel=0.1)


def test_without_a_suspicion_the_end_costs_nothing() -> None:
    loop = Loop().train(30, nothing)
    before = len(loop.notes.took)
    loop.scheduler.end(loop.position, None)
    assert len(loop.notes.took) == before


def test_a_proof_that_says_nothing_about_the_end_is_looked_at_once_more() -> None:
    loop = Loop().train(38, leaking)
    last = max(taken(loop))
    assert list(loop.proven()) == [LOSSES] and last < 30
    loop.scheduler.end(loop.position, None)
    assert taken(loop)[-1] == 38 and list(loop.proven()) == [LOSSES]


@pytest.mark.parametrize("seed", range(8))
def test_what_stopped_shortly_before_the_end_is_not_proven_where_noise_hides_it(seed: int) -> None:
    chance = random.Random(seed)
    noise = [6 * chance.random() for _ in range(60)]

    def fills(step: int) -> dict[str, int]:
        return {"cache[*]": min(step, 40)}

    loop = Loop().train(57, fills, lambda step: min(step, 40) + noise[step])
    loop.scheduler.end(loop.position, None)
    assert not loop.proven()


def test_what_grows_in_a_short_run_is_named_when_its_functions_have_returned() -> None:
    """Recorders of allocation sites have kept malloc's counter from being read: it shows nothing yet."""
    loop = Loop()
    for step in range(1, 17):
        loop.notes.held = leaking(step)
        loop.step(**({} if step in (2, 5, 7, 9, 12) else {"cpu": (100 + step) * MIB}))
    loop.notes.held = {}
    loop.scheduler.end(loop.position, None)
    (leak,) = loop.leaks()
    assert (leak.holder, leak.bytes_per_step) == (LOSSES, MIB)


def test_running_out_of_memory_hides_nothing_that_was_proven() -> None:
    for extra in range(8):  # steps after the proof
        loop = Loop().train(24 + extra, leaking)
        loop.scheduler.census(loop.position, ())
        assert taken(loop)[-1] == loop.steps + 1  # counts for the step that has begun
        assert list(loop.proven()) == [LOSSES]


def test_out_of_memory_takes_the_first_census() -> None:
    loop = Loop().train(1, nothing)
    assert loop.notes.took == []
    loop.scheduler.census(loop.position, ())
    assert taken(loop) == [2]


# --- over time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("makes_up", [True, False])
def test_rates_are_those_without_pauses(makes_up: bool) -> None:
    """A server does after a pause what it missed; a loop that computes does not."""
    loop, served = Loop(Notes(seconds=2)), 0.0
    for _ in range(800):
        due = 10 * (loop.now_s + 0.05)
        served = min(due, served + 5) if makes_up else served + 0.5
        loop.notes.held = leaking(round(served))
        before = loop.notes.paused_s
        loop.time(0.05, cpu=round((100 + served) * MIB))
        loop.now_s += loop.notes.paused_s - before
    loop.scheduler.end(loop.position, None)
    assert loop.notes.paused_s >= 4
    assert loop.proven() == {LOSSES: pytest.approx(10 * MIB, rel=0.1)}


# --- before the program's work repeats ------------------------------------------------------------------


def loaded(notes: Notes) -> Loop:
    """A program that has grown by 20 MiB per second, and was not seen to repeat anything."""
    loop = Loop(notes)
    for mark in range(1, 41):
        notes.held = leaking(mark)
        loop.time(0.05, works=False, cpu=(100 + mark) * MIB)
    return loop


class NothingRecorded(Notes):
    """A program in which no recorder may be started."""

    def record(self, remaining: int, period: float | None = None, *, again: bool = False) -> None:
        raise AssertionError("a recorder of allocation sites was started")


def test_what_loads_and_builds_has_no_census_and_no_recorder() -> None:
    loop = loaded(NothingRecorded())
    assert loop.notes.took == [] and loop.evidence.main.marks == 39
    loop.train(2, nothing)
    assert loop.notes.took == []


def test_what_never_repeats_is_judged_at_its_end_by_one_census() -> None:
    loop = loaded(NothingRecorded())
    loop.scheduler.end(loop.position, None)
    assert taken(loop) == [pytest.approx(2.0)]
    (finding,) = loop.leaks()
    assert (finding.certainty, str(finding.holder)) == ("suspected", LOSSES)
    assert finding.bytes_per_second == pytest.approx(20 * MIB, rel=0.01)


def test_what_no_census_at_the_end_explains_is_not_named() -> None:
    loop = loaded(NothingRecorded())
    loop.notes.held = {"model": 5}
    loop.scheduler.end(loop.position, None)
    (finding,) = loop.leaks()
    assert finding.certainty == "suspected" and str(finding.holder).startswith("not named")
    assert "memtriage.step()" in str(finding.fix)


def test_growth_counts_from_when_work_was_seen_to_repeat() -> None:
    loop = loaded(Notes())
    loop.notes.held = nothing(0)
    for _ in range(60):
        loop.time(0.05, cpu=140 * MIB)
    assert loop.judged().counters["cpu"].growth.state == "flat"
    loop.scheduler.end(loop.position, None)
    assert loop.leaks() == []


# --- what recorders and counters are asked for --------------------------------------------------------------


class Records(Notes):
    """Notes what recorders are asked for: positions that remain, the period, and whether once more."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, float | None, bool]] = []

    def record(self, remaining: int, period: float | None = None, *, again: bool = False) -> None:
        self.asked.append((remaining, period, again))

    def follow(self, following: Following, *args: Any, **kwargs: Any) -> Any:
        following.recorded += bool(self.asked)
        return super().follow(following, *args, **kwargs)


def test_over_time_a_program_s_own_work_begins_at_its_first_mark() -> None:
    """It imports and loads for a minute. Marks come each half second."""
    loop = Loop()
    loop.notes.held = nothing(0)
    loop.now_s = 59.5
    for _ in range(60):
        loop.time(0.5, cpu=100 * MIB)
    first, second = taken(loop)
    assert first == 65
    assert second - 60 == pytest.approx(4 * 5, abs=0.5)


def test_recorders_are_told_how_many_marks_remain() -> None:
    notes, last_marks = Records(), []
    loop = Loop(notes)
    for mark in range(1, 31):
        notes.held, asked = nothing(mark), len(notes.asked)  # what grows has no holder
        loop.time(0.5, cpu=(100 + mark) * MIB)
        if [remaining for remaining, *_ in notes.asked[asked:]] == [1]:
            last_marks.append(loop.now_s - notes.paused_s)
    places = taken(loop)
    before_census = [at for at in last_marks if at < places[-1]]
    assert len(before_census) >= 2
    assert all(any(place == pytest.approx(at + 0.5, abs=0.1) for place in places) for at in before_census)
    again = [once_more for *_, once_more in notes.asked]
    assert again == sorted(again) and {*again} == {False, True}


def test_nothing_is_recorded_of_what_is_proven() -> None:
    notes = Records()
    loop = Loop(notes).train(60, leaking)
    asked = len(notes.asked)
    assert 0 < asked < 40 and loop.proven()
    loop.train(20, leaking)
    assert len(notes.asked) == asked


def test_recorders_are_told_the_period_of_what_grows() -> None:
    notes = Records()
    Loop(notes).train(120, nothing, malloc=lambda step: step // 10)
    assert {period for _, period, _ in notes.asked} >= {10}
    assert {period for _, period, _ in notes.asked} <= {0, 10}


def test_a_late_leak_that_is_proven_ages_by_the_time_it_was_seen_to_grow() -> None:
    """It began at step 300. By step 340 its proof says nothing of the end."""
    loop = Loop().train(300, nothing)
    loop.train(40, lambda step: {"model": 50, LOSSES: step - 300})
    last = max(taken(loop))
    while loop.steps < 500 and not (loop.proven() and loop.steps - last > 0.4 * (last - 300)):
        loop.train(1, lambda step: {"model": 50, LOSSES: step - 300})
        last = max(taken(loop))
    loop.scheduler.end(loop.position, None)
    assert taken(loop)[-1] == loop.steps > last


class OnGPU(Notes):
    """Its losses are on a GPU."""

    def groups(self) -> list[HolderGroup]:
        return [group(name, n * MIB, n, device="cuda:0", token=1) for name, n in self.held.items()]


def test_a_leak_on_a_gpu_explains_nothing_that_grows_on_the_host() -> None:
    alone, with_native = Loop(OnGPU()), Loop(OnGPU())
    for step in range(1, 121):
        for loop, native in ((alone, 0), (with_native, step)):
            loop.notes.held = {LOSSES: 10 * step}
            loop.step(**{"cuda:0": (100 + 10 * step) * MIB, "cpu": (100 + native) * MIB})
    assert {finding.device for finding in alone.leaks()} == {"cuda:0"}
    assert {finding.device for finding in with_native.leaks()} == {"cuda:0", "host"}
    assert len(taken(with_native)) > len(taken(alone)) + 2  # its holder is still looked for


# --- whole courses ------------------------------------------------------------------------------------------

COURSES: dict[str, Callable[[int], dict[str, int]]] = {
    "nothing": lambda step: {"model": 50},
    "a leak": leaking,
    "a leak from 25 on": lambda step: {"model": 50, LOSSES: max(0, step - 25)},
    "an entry in five": lambda step: {LOSSES: step // 5},
    "a cache": lambda step: {"cache[*]": min(step, 25)},
    "a cache, then a leak": lambda step: {"cache[*]": min(step, 15), LOSSES: max(0, step - 35)},
    "a list that is emptied": lambda step: {"buffer[*]": step % 12},
    "two leaks": lambda step: {LOSSES: step, "odd[*]": 3 * step},
    "a leak that ends": lambda step: {LOSSES: min(step, 45)},
    "faster and faster": lambda step: {LOSSES: step * step // 30},
}


WITH_NATIVE_GROWTH = ("nothing", "a leak", "a cache", "a list that is emptied")


# Bytes a step of each leak at the end of 60 steps, and whether it is one.
RATES = {
    "a leak": {LOSSES: MIB},
    "a leak from 25 on": {LOSSES: MIB},
    "an entry in five": {LOSSES: MIB / 5},
    "a cache, then a leak": {LOSSES: MIB},
    "two leaks": {LOSSES: MIB, "odd[*]": 3 * MIB},
}


@pytest.mark.parametrize("by_time", [False, True], ids=["steps", "seconds"])
@pytest.mark.parametrize("name", [name for name in COURSES if name != "faster and faster"])
def test_whole_courses(name: str, by_time: bool) -> None:
    loop = course(name, 0, by_time)
    per = 2 if by_time else 1  # two steps a second
    rates = {holder: per * rate for holder, rate in RATES.get(name, {}).items()}
    assert loop.proven() == pytest.approx(rates, rel=0.1)


@pytest.mark.parametrize("by_time", [False, True], ids=["steps", "seconds"])
@pytest.mark.parametrize("name", WITH_NATIVE_GROWTH)
def test_native_growth_beside_a_course(name: str, by_time: bool) -> None:
    leaks = course(name, 2, by_time).leaks()
    native = [leak for leak in leaks if leak.holder_path is None]
    rates = [rate for leak in native for rate in leak.rates.values()]
    assert rates and rates[0] == pytest.approx((4 if by_time else 2) * MIB, rel=0.1)


def test_a_leak_that_grows_faster_and_faster_is_proven() -> None:
    """61 MiB at step 30, 120 at step 60: on average 2 MiB a step, at last 4."""
    loop = course("faster and faster", 0, by_time=False)
    assert list(loop.proven()) == [LOSSES]
    (rise,) = attribute(loop.evidence.main)
    assert rise.recent > rise.rate >= 1.5 * MIB


def course(name: str, native: int, by_time: bool) -> Loop:
    loop = Loop()
    for step in range(1, 61):
        loop.notes.held = COURSES[name](step)
        malloc = round((100 + sum(loop.notes.held.values()) + native * step) * MIB)
        before = loop.notes.paused_s
        if by_time:
            loop.time(0.5, cpu=malloc, host=malloc + 400 * MIB)
        else:
            loop.step(cpu=malloc, host=malloc + 400 * MIB)
        loop.now_s += loop.notes.paused_s - before
    loop.scheduler.end(loop.position, None)
    return loop
