"""When censuses are taken, and what comes of them: followed by a script of counters and holders."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.diagnose.growth.judged import judge_counter
from memtriage.model.census import HolderGroup
from memtriage.model.judged import Judged
from memtriage.model.position import Scale, TrainingPosition
from memtriage.model.units import MIB
from memtriage.session.schedule import scale as scale_module
from memtriage.session.schedule.investigation import Investigator
from memtriage.session.schedule.judgment import judge_devices
from memtriage.session.schedule.scale import ScaleScheduler
from support.censuses import group
from support.expected import assert_as_kept
from support.marked_loops import LOOK, LOSSES, Loop, Notes, SmallEntries, leaking, nothing, taken
from support.simulated import clock, clock_of

# --- from step to step --------------------------------------------------------------------------------------


def test_healthy_run_has_few_censuses_and_no_recording() -> None:
    loop = Loop().train(300, nothing)
    assert taken(loop) == [3, 6, 24, 96]
    assert loop.notes.looks == [LOOK] * 4
    assert loop.notes.recorded == [] and loop.found == 0
    assert loop.leaks() == []


def test_growing_holder_is_proven_within_twenty_steps() -> None:
    loop = Loop().train(24, leaking)
    assert loop.proven() == {LOSSES: MIB}
    assert {scale for scale, _ in loop.notes.took} == {"step"}


def test_sites_are_recorded_before_a_census_of_a_suspicion() -> None:
    loop = Loop().train(24, leaking)
    assert {1, 2} <= set(loop.notes.recorded)


def test_recorders_do_not_stay_on_where_the_census_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    while not loop.notes.recorded or loop.notes.recorded[-1] != 1:
        loop.train(1, leaking)
    stopped = loop.notes.stopped
    monkeypatch.setattr(scale_module, "affordable", lambda *_, **__: False)
    loop.train(1, leaking)
    assert loop.notes.stopped == stopped + 1
    asked = len(loop.notes.recorded)
    loop.train(20, leaking)
    assert (loop.notes.stopped, len(loop.notes.recorded)) == (stopped + 1, asked)


def test_proven_leak_is_checked_when_the_run_doubles() -> None:
    loop = Loop().train(40, leaking)
    begun = len(loop.notes.took)
    loop.train(1_000, leaking)
    assert len(loop.notes.took) - begun <= 1 + math.log2(1_040 / 20)
    assert loop.proven() == {LOSSES: MIB}


def test_growth_that_becomes_faster_has_no_native_part() -> None:
    loop = Loop().train(120, lambda step: {LOSSES: step * step // 20})
    (finding,) = loop.leaks()
    assert finding.holder == LOSSES


def test_suspicion_beside_a_much_larger_leak_is_not_reported() -> None:
    def held(step: int) -> dict[str, int]:
        return {LOSSES: 50 * step, "odd[*]": min(step, 8) + step // 4}

    loop = Loop().train(14, held)
    assert [finding.holder for finding in loop.leaks()] == [LOSSES]


def test_native_growth_and_its_container_are_one_finding() -> None:
    loop = Loop()
    loop.notes.entry_bytes = {"train.texts": MIB // 2}  # the other half is native
    for step in range(1, 80):
        loop.notes.texts = step
        loop.step(cpu=(100 + step) * MIB, host=(500 + step) * MIB)
    (finding,) = loop.leaks()
    assert finding.holder == "train.texts[*]"
    assert finding.bytes_per_step == pytest.approx(MIB, rel=0.1)


def test_what_a_flat_counter_contradicts_is_no_leak() -> None:
    loop = Loop().train(200, leaking, malloc=lambda step: 0)
    assert loop.leaks() == []


def test_what_no_counter_sees_is_proven_by_its_holder() -> None:
    loop = Loop()
    for step in range(1, 60):
        loop.notes.held = leaking(step)
        loop.step()
    assert loop.proven() == {LOSSES: MIB}


@pytest.mark.parametrize("onset", [20, 200])
def test_an_onset_in_the_middle_of_a_run_is_found(onset: int) -> None:
    loop = Loop().train(onset, nothing)
    loop.train(onset + 30, lambda step: {"model": 50, LOSSES: step - onset})
    (rate,) = loop.proven().values()
    assert rate == pytest.approx(MIB, rel=0.2)


@pytest.mark.parametrize("period", [10, 50])
def test_what_grows_every_so_many_steps_is_found(period: int) -> None:
    loop = Loop().train(12 * period, lambda step: {"epochs[*]": 1 + step // period})
    (rate,) = loop.proven().values()
    assert rate == pytest.approx(MIB / period, rel=0.2)


@pytest.mark.parametrize(
    ("bound", "steps"), [(5, 90), (15, 150), (60, 420), (45, 60), (50, 100), (100, 140), (200, 300)]
)
def test_what_fills_and_stops_is_no_leak(bound: int, steps: int) -> None:
    loop = Loop().train(steps, lambda step: {"cache[*]": min(step, bound)})
    assert loop.proven() == {}
    assert len(loop.notes.took) <= 20


@pytest.mark.parametrize("at", [4, 30, 90])
def test_one_allocation_is_no_leak(at: int) -> None:
    loop = Loop().train(100, lambda step: {"model": 50} | ({"table": 600} if step > at else {}))
    assert loop.leaks() == []


def test_what_grows_after_a_cache_has_filled_is_found() -> None:
    loop = Loop().train(200, lambda step: {"cache[*]": min(step, 20), LOSSES: max(0, step - 100)})
    assert list(loop.proven()) == [LOSSES]


def test_a_counter_s_noise_hides_no_slow_growth() -> None:
    chance = random.Random(3)
    loop = Loop().train(700, lambda step: {"batch": chance.randrange(10), LOSSES: step // 5})
    assert loop.proven()[LOSSES] == pytest.approx(MIB / 5, rel=0.2)


@pytest.mark.parametrize("period", [10, 20])
def test_a_list_that_is_emptied_now_and_then_is_not_native_growth(period: int) -> None:
    loop = Loop().train(45, lambda step: {"buffer[*]": step % period})
    assert loop.proven() == {}


def test_holders_that_come_and_go_are_no_leak_under_noise() -> None:
    chance = random.Random(3)
    loop = Loop().train(300, lambda step: {"batch[*]": chance.randrange(1, 40)})
    assert loop.leaks() == []
    assert len(loop.notes.took) <= 12


def test_growth_without_a_holder_is_native() -> None:
    loop = Loop().train(60, nothing, malloc=lambda step: step)
    (finding,) = loop.leaks()
    assert (finding.device, finding.holder_path) == ("host", None)
    assert finding.bytes_per_step == pytest.approx(MIB, rel=0.05)


def test_growth_after_the_last_census_is_not_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is emptied while early censuses hold the program up, and later gets longer."""
    loop = Loop().train(30, lambda step: {"model": 50, "jobs[*]": 1})
    loop.scheduler.census(loop.position)
    monkeypatch.setattr(scale_module, "affordable", lambda *args, **options: False)
    loop.train(60, lambda step: {"model": 50, "jobs[*]": step - 29})
    assert [leak.certainty for leak in loop.leaks()] == ["suspected"]
    loop.scheduler.main.end(loop.position, None)
    assert {leak.holder for leak in loop.leaks()} == {"jobs[*]"}


def test_all_libraries_are_walked_only_where_sure_growth_has_no_holder() -> None:
    unnamed = Loop().train(60, nothing, malloc=lambda step: step)
    named, flat = Loop().train(60, leaking), Loop().train(60, nothing)
    asked = unnamed.notes.libraries
    assert asked[:2] == [False, False] and asked[-1]
    assert asked == sorted(asked)  # from then on at each census: what grows is compared with the one before
    assert not any(named.notes.libraries) and not any(flat.notes.libraries)


def test_data_that_grows_is_proven_by_its_container() -> None:
    loop = Loop()
    for step in range(1, 60):
        loop.notes.texts = 16 * step
        loop.step(cpu=100 * MIB, host=(500 + step) * MIB)
    assert loop.proven() == {"train.texts[*]": MIB}


def test_each_change_of_what_is_known_is_passed_on() -> None:
    loop, before = Loop(), 0
    while not loop.proven():
        before = loop.found
        loop.train(1, leaking)
    assert loop.found > before  # as soon as it is proven


@given(st.integers(6, 400), st.integers(1, 4))
@settings(max_examples=20)
def test_censuses_of_a_healthy_run_are_bounded_by_its_logarithm(steps: int, microbatches: int) -> None:
    loop = Loop()
    loop.notes.held = {"model": 50}
    for _ in range(steps):
        for _ in range(microbatches):
            loop.backward(cpu=120 * MIB)
        loop.step(cpu=100 * MIB)
    assert len(loop.notes.took) <= 2 + math.log(steps / 6, 4) + 1e-9


# --- what may be said of a device where memory grows --------------------------------------------------------


def judged_cpu(loop: Loop) -> Judged:
    return judge_devices(loop.scheduler.judged_on, {"cpu": True})["cpu"]


def test_unproven_holder_growth_has_no_detection_limit() -> None:
    loop = Loop().train(20, leaking)
    assert judged_cpu(loop).detection_limit is None


def test_a_log_that_makes_the_counter_rise_is_a_limit() -> None:
    loop = Loop(SmallEntries()).train(200, lambda step: {LOSSES: 40 * step}, malloc=lambda step: step / 50)
    said = judged_cpu(loop)
    assert said.detection_limit is not None
    assert said.detection_limit.bytes == pytest.approx(MIB / 50, rel=0.1)


def test_a_false_alarm_leaves_enough_for_a_leak_later_in_the_run(slow: Loop) -> None:
    loop = slow.train(30, lambda step: {"warm_up[*]": min(step, 15)})
    loop.train(400, lambda step: {"warm_up[*]": 15, LOSSES: max(0, step - 150)})
    assert loop.proven()[LOSSES] == pytest.approx(MIB, rel=0.2)


def test_censuses_before_a_late_onset_count_if_memory_grew_as_fast_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop()
    loop.notes.bounds["buffer"] = 5000

    def held(step: int) -> dict[str, int]:
        return {"buffer[*]": step}

    def malloc(step: int) -> float:
        return step - 25 * (step > 40)

    loop.train(39, held, malloc)
    monkeypatch.setattr(scale_module, "affordable", lambda *args, **options: False)
    loop.train(41, held, malloc)
    assert (loop.scheduler.main.counters["cpu"].estimate().onset or 0) > 40  # after what was released
    assert max(place for _, place in loop.notes.took) < 40
    said = judged_cpu(loop)
    assert said.detection_limit is not None
    assert said.detection_limit.bytes == pytest.approx(MIB, rel=0.1)


def test_data_that_begins_late_is_found_by_the_resident_set() -> None:
    loop = Loop()
    loop.notes.held = nothing(0)
    for step in range(1, 400):
        loop.notes.texts = 1 + 16 * max(0, step - 110)
        loop.step(cpu=100 * MIB, host=(500 + max(0, step - 110)) * MIB)
    assert loop.proven()["train.texts[*]"] == pytest.approx(MIB, rel=0.2)


class LossesOnGPU(Notes):
    """Losses of 4 bytes, as many as `held` says."""

    def groups(self) -> list[HolderGroup]:
        return [group(name, 4 * n, n, device="cuda:0", token=1) for name, n in self.held.items()]


def test_losses_kept_on_a_gpu_explain_a_block_each() -> None:
    loop = Loop(LossesOnGPU())
    for step in range(1, 41):
        loop.notes.held = {LOSSES: step}
        loop.step(**{"cuda:0": MIB + 512 * step})
    judged = judge_devices(loop.scheduler.judged_on, {"cuda:0": True})["cuda:0"]
    assert judged.detection_limit is not None and judged.detection_limit.bytes == 512
    assert loop.leaks() == []


# --- cost ---------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """A program in which each census takes half a minute."""
    notes = Notes(seconds=30)
    monkeypatch.setattr(scale_module, "time", clock(notes))
    return Loop(notes)


def test_confirmed_leak_gets_no_more_censuses_than_it_is_worth(slow: Loop) -> None:
    loop = slow.train(20, leaking)
    begun = len(loop.notes.took)
    loop.train(300, leaking)
    assert len(loop.notes.took) == begun  # what they may take is spent
    assert loop.proven() == {LOSSES: MIB}


def test_slow_censuses_are_few(slow: Loop) -> None:
    assert taken(slow.train(300, nothing)) == [3, 6]


def test_slow_censuses_settle_a_suspicion_all_the_same(slow: Loop) -> None:
    loop = slow.train(300, leaking)
    assert loop.proven() == {LOSSES: MIB}
    assert len(loop.notes.took) <= 8


def test_slow_censuses_leave_the_program_time(slow: Loop) -> None:
    loop = slow
    for mark in range(1, 401):
        loop.notes.held = leaking(mark)
        before = loop.notes.seconds
        loop.time(0.5, cpu=(100 + mark) * MIB)
        loop.now_s += loop.notes.seconds - before  # the program waited
    assert loop.proven() == {LOSSES: 2 * MIB}
    work = scale_module.SUSPICION.work * 30
    assert 0 < work <= min(later - earlier for earlier, later in itertools.pairwise(taken(loop)))


def test_slow_censuses_prove_the_leak_of_a_short_program(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(seconds=1.5)
    monkeypatch.setattr(scale_module, "time", clock(notes))
    loop = Loop(notes)
    for mark in range(1, 41):  # four seconds of its own
        loop.notes.held = leaking(mark)
        before = loop.notes.seconds
        loop.time(0.1, cpu=(100 + mark) * MIB)
        loop.now_s += loop.notes.seconds - before
    assert list(loop.proven()) == [LOSSES]


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
    loop = Loop().train(6, leaking)
    while not any(leak.certainty == "suspected" for leak in loop.leaks()):
        loop.train(1, leaking)
    return loop.train(1, leaking)


@pytest.mark.parametrize("frames", [None, []])
def test_at_the_end_a_suspicion_is_looked_at_once_more(frames: list[Any] | None) -> None:
    loop = suspected()
    before = len(loop.notes.took)
    loop.scheduler.main.end(loop.position, frames)
    assert loop.notes.took[before:] == [("step", loop.steps)]
    assert loop.notes.between[-1] is False
    assert LOSSES in {leak.holder for leak in loop.leaks()}


def test_what_is_gone_at_the_end_keeps_its_suspicion() -> None:
    loop = suspected()
    loop.notes.held = {}
    loop.scheduler.main.end(loop.position, None)
    assert LOSSES in {leak.holder for leak in loop.leaks()}


def test_without_a_suspicion_the_end_costs_nothing() -> None:
    loop = Loop().train(30, nothing)
    before = len(loop.notes.took)
    loop.scheduler.main.end(loop.position, None)
    assert len(loop.notes.took) == before


def test_a_proof_that_says_nothing_about_the_end_is_looked_at_once_more() -> None:
    loop = Loop().train(38, leaking)
    last = max(taken(loop))
    assert list(loop.proven()) == [LOSSES] and last < 30
    loop.scheduler.main.end(loop.position, None)
    assert taken(loop)[-1] == 38 and list(loop.proven()) == [LOSSES]


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_what_stopped_shortly_before_the_end_is_not_proven_where_noise_hides_it(seed: int) -> None:
    chance = random.Random(seed)
    noise = [6 * chance.random() for _ in range(60)]

    def fills(step: int) -> dict[str, int]:
        return {"cache[*]": min(step, 47)}

    loop = Loop().train(57, fills, lambda step: min(step, 47) + noise[step])
    assert loop.proven()
    loop.scheduler.main.end(loop.position, None)
    assert not loop.proven()


def test_what_grows_in_a_short_run_is_proven_when_its_functions_have_returned() -> None:
    """Recorders of allocation sites have kept malloc's counter from being read: it shows nothing yet."""
    loop = Loop()
    for step in range(1, 17):
        loop.notes.held = leaking(step)
        loop.step(**({} if step in (2, 5, 7, 9, 12) else {"cpu": (100 + step) * MIB}))
    assert loop.scheduler.main.counters["cpu"].estimate().state == "too_short"
    loop.notes.held = {}
    loop.scheduler.main.end(loop.position, None)
    assert list(loop.proven()) == [LOSSES]


def test_running_out_of_memory_hides_nothing_that_was_proven() -> None:
    for extra in range(8):  # steps after the proof
        loop = Loop().train(24 + extra, leaking)
        loop.scheduler.census(loop.position, ())
        assert loop.notes.took[-1] == ("step", loop.steps + 1)  # counts for the step that has begun
        assert list(loop.proven()) == [LOSSES]


def test_out_of_memory_takes_the_first_census() -> None:
    loop = Loop().train(1, nothing)
    assert loop.notes.took == []
    loop.scheduler.census(loop.position, ())
    assert loop.notes.took == [("step", 2)]


def test_two_censuses_at_one_position_are_not_compared() -> None:
    loop = Loop().train(3, nothing)
    loop.scheduler.census(loop.position)
    assert loop.notes.took == [("step", 3), ("none", 3)]
    assert loop.scheduler.main.investigation.taken == [3]


# --- over time ----------------------------------------------------------------------------------------------


def test_seconds_are_the_programs_own_which_waits_for_each_census(slow: Loop) -> None:
    for mark in range(1, 51):
        slow.notes.held = leaking(mark)
        before = slow.notes.seconds
        slow.time(0.1, cpu=(100 + mark) * MIB)
        slow.now_s += slow.notes.seconds - before
    assert slow.notes.seconds == 60  # the second comes after a tenth of what the first took
    counter = slow.scheduler.main.counters["cpu"]
    found, judged = judge_counter(counter.track, "time", counter.policy)
    assert (found.state, found.rate) == ("growing", pytest.approx(10 * MIB, rel=0.01))
    assert judged.reason is None


@pytest.mark.parametrize("makes_up", [True, False])
def test_rates_are_those_without_pauses(makes_up: bool) -> None:
    """A server does after a pause what it missed; a loop that computes does not."""
    loop, served = Loop(Notes(seconds=2)), 0.0
    with clock_of(loop.notes):
        for _ in range(400):
            due = 10 * (loop.now_s + 0.05)
            served = min(due, served + 5) if makes_up else served + 0.5
            loop.notes.held = leaking(round(served))
            before = loop.notes.seconds
            loop.time(0.05, cpu=round((100 + served) * MIB))
            loop.now_s += loop.notes.seconds - before
        loop.scheduler.main.end(loop.position, None)
    assert loop.notes.seconds >= 6
    assert loop.proven() == {LOSSES: pytest.approx(10 * MIB, rel=0.1)}


def test_what_is_freed_when_functions_return_is_no_doubt() -> None:
    loop, served = Loop(), 0.0
    for _ in range(400):
        served += 0.5
        loop.notes.held = leaking(round(served))
        loop.time(0.05, cpu=round((100 + served) * MIB))
    loop.time(1.4, cpu=100 * MIB)  # the mark that was due while all that was freed
    loop.notes.held = nothing(0)
    loop.scheduler.main.end(loop.position, None)
    assert loop.proven() == {LOSSES: pytest.approx(10 * MIB, rel=0.1)}


def test_native_growth_that_speeds_up_stays_native() -> None:
    loop, native = Loop(Notes(seconds=5)), 0.0
    for mark in range(1, 401):
        loop.notes.held = nothing(0)
        native += 0.8 if mark < 200 else 1.2  # MiB: something else leaves the machine
        loop.time(0.1, cpu=round((100 + native) * MIB), host=round((500 + native) * MIB))
    last = loop.notes.took[-1][1]
    assert loop.scheduler.main.counters["cpu"].estimate().onset is None or last < 40
    (finding,) = loop.leaks()
    assert (finding.certainty, finding.holder_path) == ("proven", None)


def test_healthy_program_over_time_has_few_censuses() -> None:
    loop = Loop()
    for _ in range(400):
        loop.notes.held = nothing(0)
        loop.time(0.5, cpu=100 * MIB)
    assert len(loop.notes.took) <= 7
    assert loop.leaks() == []


# --- one scale ----------------------------------------------------------------------------------------------


class Records(Notes):
    """Notes what recorders are asked for: positions that remain, the period, and whether once more."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, float | None, bool]] = []

    def record(self, remaining: int, period: float | None = None, *, again: bool = False) -> None:
        self.asked.append((remaining, period, again))


def followed(scale: Scale, notes: Notes | None = None) -> ScaleScheduler:
    return ScaleScheduler(scale, cast(Investigator, notes or Notes()), LOOK, lambda: None)


def ramp(scheduler: ScaleScheduler, **counters: Sequence[float]) -> ScaleScheduler:
    """A scale of steps whose counters show so many MiB, one value a step, and no census."""
    for step in range(1, 1 + max(map(len, counters.values()))):
        values = {
            name: round(series[step - 1] * MIB) for name, series in counters.items() if step <= len(series)
        }
        scheduler.at_mark(TrainingPosition(step=step), values, censuses=False)
    return scheduler


@pytest.mark.parametrize(("scale", "place"), [("step", 5), ("microbatch", 22), ("second", 7.5)])
def test_a_place_is_a_number_of_steps_of_backwards_or_of_seconds(scale: Scale, place: float) -> None:
    scheduler = followed(scale)
    assert (scheduler.scale, scheduler.now, scheduler.marks) == (scale, 0.0, 0)
    position = TrainingPosition(step=5, microbatch=2, backwards=22, time_s=7.5)
    scheduler.at_mark(position, {"cpu": MIB})
    assert (scheduler.now, scheduler.marks) == (place, 1)
    scheduler.census(position)
    assert scheduler.investigation.taken == [place]


@pytest.mark.parametrize(
    ("frames", "scale", "place"), [((), "step", 6), ((), "second", 7.5), (None, "step", 5)]
)
def test_a_census_in_the_middle_of_a_step_counts_for_that_step(
    frames: Sequence[Any] | None, scale: Scale, place: float
) -> None:
    scheduler = followed(scale)
    scheduler.census(TrainingPosition(step=5, time_s=7.5), frames)
    assert scheduler.investigation.taken == [place]


def test_over_time_a_program_s_own_work_begins_at_its_first_mark() -> None:
    """It imports and loads for a minute. Marks come each half second."""
    loop = Loop()
    loop.notes.held = nothing(0)
    loop.now_s = 59.5
    for _ in range(60):
        loop.time(0.5, cpu=100 * MIB)
    assert taken(loop) == [65, pytest.approx(70.5, abs=0.01)]


def test_recorders_are_told_how_many_marks_remain() -> None:
    notes, last_marks = Records(), []
    loop = Loop(notes)
    for mark in range(1, 31):
        notes.held, asked = leaking(mark), len(notes.asked)
        loop.time(0.5, cpu=(100 + mark) * MIB)
        if [remaining for remaining, *_ in notes.asked[asked:]] == [1]:
            last_marks.append(loop.now_s)
        loop.scheduler.main.investigation.recorded = min(len(notes.asked), 1)
    places = [place for _, place in notes.took]
    assert len(last_marks) >= 2
    assert all(any(place == pytest.approx(at + 0.5, abs=0.1) for place in places) for at in last_marks)
    assert [again for *_, again in notes.asked] == [False, *[True] * (len(notes.asked) - 1)]


def test_nothing_is_recorded_of_what_is_proven() -> None:
    notes = Records()
    loop = Loop(notes).train(60, leaking)
    asked = len(notes.asked)
    assert 0 < asked < 40 and loop.proven() and loop.scheduler.main.investigation.lacks_sites
    loop.train(20, leaking)
    assert len(notes.asked) == asked


def test_recorders_are_told_the_period_of_what_grows() -> None:
    notes = Records()
    Loop(notes).train(120, lambda step: {"epochs[*]": 1 + step // 10})
    assert {period for _, period, _ in notes.asked} >= {10}
    assert {period for _, period, _ in notes.asked} <= {None, 10}


def test_generated_code_has_no_period_that_censuses_follow() -> None:
    scheduler = followed("step")
    for step in range(1, 121):
        values = {"cpu": 100 * MIB, "code": MIB * (1 + step // 10)}
        scheduler.at_mark(TrainingPosition(step=step), values)
    assert scheduler.counters["code"].estimate().period == 10
    assert scheduler.investigation.period is None


@pytest.mark.parametrize(
    ("code", "generated"),
    [
        pytest.param([], False, id="never read"),
        pytest.param([1] * 6, False, id="constant"),
        pytest.param([5, 5, 5, 5, 4, 4, 4, 4], False, id="falls"),
        pytest.param([1, 1, 1, 1, 1, 1, 2, 2], True, id="rises"),
    ],
)
def test_code_is_generated_where_it_grows(code: list[float], generated: bool) -> None:
    assert ramp(followed("step"), cpu=[1] * 8, code=code).generates_code() is generated


CODE_COMES = [20 + step // 6 * 0.5 for step in range(48)]


@pytest.mark.parametrize(
    ("counters", "fills"),
    [
        pytest.param(
            {"cpu": [100 + code / 5 for code in CODE_COMES], "code": CODE_COMES}, True, id="with it"
        ),
        pytest.param({"cpu": [100 + step / 50 for step in range(48)]}, False, id="no code"),
        pytest.param({"code": CODE_COMES}, False, id="no memory"),
        pytest.param({"cpu": [100 + step for step in range(48)], "code": CODE_COMES}, False, id="far more"),
    ],
)
def test_a_cache_of_code_explains_what_comes_with_code(counters: dict[str, list[float]], fills: bool) -> None:
    assert ramp(followed("step"), **counters).fills_with_code(0) is fills


def with_censuses(scheduler: ScaleScheduler, held: Mapping[float, float]) -> ScaleScheduler:
    """Add censuses that found so many MiB to have a holder, by place."""
    scheduler.investigation.totals = [(place, {"cpu": round(mib * MIB)}) for place, mib in held.items()]
    return scheduler


@pytest.mark.parametrize(
    ("held", "all_named"),
    [
        pytest.param({28: 10, 34: 16, 40: 22}, True, id="all of it"),
        pytest.param({28: 10, 34: 10, 40: 18.5}, True, id="most of it"),
        pytest.param({28: 10, 34: 16, 40: 18}, False, id="too little"),
        pytest.param({27: 10, 40: 23}, False, id="one interval"),
        pytest.param({10: 0, 20: 0, 28: 10, 40: 22}, False, id="one interval since it began"),
        pytest.param({10: 22, 27: 9, 34: 16, 40: 22}, True, id="other holders have gone before"),
        pytest.param({}, False, id="no census"),
    ],
)
def test_all_of_a_rise_has_a_holder(held: dict[float, float], all_named: bool) -> None:
    """The counter rises all the time, and surely since step 27."""
    scheduler = with_censuses(ramp(followed("step"), cpu=range(50)), held)
    assert scheduler.names_all("cpu") is all_named


def test_a_counter_that_does_not_rise_has_nothing_to_be_named() -> None:
    flat = with_censuses(ramp(followed("step"), cpu=[1] * 50), {10: 1, 20: 1, 40: 1})
    assert flat.names_all("cpu") is False
    rises = with_censuses(ramp(followed("step"), cpu=[1] * 50), {10: 1, 20: 1, 40: 2})
    assert rises.names_all("cpu") is False


@pytest.mark.parametrize(
    ("held", "covered"),
    [
        pytest.param({}, True, id="no census"),
        pytest.param({10: 1, 20: 1, 40: 1}, True, id="while it grew"),
        pytest.param({4: 1, 9: 1}, True, id="before, and it grew as fast then"),
        pytest.param({2: 1, 3: 1}, False, id="before anything is known of it"),
    ],
)
def test_growth_is_covered_by_censuses_while_it_lasts(held: dict[float, float], covered: bool) -> None:
    scheduler = with_censuses(ramp(followed("step"), cpu=range(50)), held)
    assert scheduler.covers_growth("cpu") is covered
    assert scheduler.covers_growth("cuda:0") is True  # nothing is known of it


def test_growth_after_the_last_census_is_not_covered() -> None:
    late = with_censuses(ramp(followed("step"), cpu=[0] * 50 + [*range(100)]), {10: 0, 30: 0})
    assert late.covers_growth("cpu") is False
    assert late.held_rate("cpu") is None
    steady = with_censuses(ramp(followed("step"), cpu=range(50)), {10: 10, 30: 25})
    assert steady.held_rate("cpu") == 0.75 * MIB
    assert steady.harmless_rate("cpu") == 0


def test_resident_memory_that_surely_grows_alone_asks_for_censuses() -> None:
    healthy, rising, explained = Loop(), Loop(), Loop()
    for step in range(1, 101):
        healthy.step(cpu=100 * MIB, host=500 * MIB)
        rising.step(cpu=100 * MIB, host=(500 + step) * MIB)
        explained.notes.held = leaking(step)
        explained.step(cpu=(100 + step) * MIB, host=(500 + step) * MIB)
    assert taken(healthy) == [3, 6, 24, 96]
    assert len(taken(rising)) > 8
    assert len(taken(explained)) < len(taken(rising))


def test_a_late_leak_that_is_proven_ages_by_the_time_it_was_seen_to_grow() -> None:
    """It began at step 300. By step 340 its proof says nothing of the end."""
    loop = Loop().train(300, nothing)
    loop.train(40, lambda step: {"model": 50, LOSSES: step - 300})
    main = loop.scheduler.main
    last = max(taken(loop))
    while not (loop.proven() and loop.steps - last > 0.4 * (last - 300)):
        loop.train(1, lambda step: {"model": 50, LOSSES: step - 300})
        last = max(taken(loop))
    main.end(loop.position, None)
    assert taken(loop)[-1] == loop.steps > last


def test_counters_may_be_followed_without_any_census() -> None:
    notes = Notes()
    scheduler = followed("microbatch", notes)
    for mark in range(1, 61):
        position = TrainingPosition(backwards=mark)
        scheduler.at_mark(position, {"cpu": (100 + mark) * MIB}, censuses=False)
    assert notes.took == [] and scheduler.marks == 60
    assert scheduler.counters["cpu"].estimate().state == "growing"


def test_on_the_scale_of_steps_pauses_move_nothing(slow: Loop) -> None:
    loop = slow.train(60, leaking)
    main = loop.scheduler.main
    before, points = list(main.investigation.taken), main.counters["cpu"].track.points().at.tolist()
    main.end(loop.position, None)
    assert main.investigation.taken[: len(before)] == before
    assert main.counters["cpu"].track.points().at.tolist() == points
    assert main.now == 60


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


@pytest.mark.parametrize("by_time", [False, True], ids=["steps", "seconds"])
def test_whole_courses(by_time: bool) -> None:
    """Censuses, recorders asked for, reports made, and what is found at last, also of native growth."""
    rows = []
    for name, native in [*((name, 0) for name in COURSES), *((name, 2) for name in WITH_NATIVE_GROWTH)]:
        loop = Loop(Records())
        with clock_of(loop.notes):
            for step in range(1, 61):
                loop.notes.held = COURSES[name](step)
                malloc = round((100 + sum(loop.notes.held.values()) + native * step) * MIB)
                before = loop.notes.seconds
                if by_time:
                    loop.time(0.5, cpu=malloc, host=malloc + 400 * MIB)
                else:
                    loop.step(cpu=malloc, host=malloc + 400 * MIB)
                loop.now_s += loop.notes.seconds - before
            loop.scheduler.main.end(loop.position, None)
        rows.append([name, native, *outcome(loop)])
    assert_as_kept(f"schedule_{'seconds' if by_time else 'steps'}", rows)


def outcome(loop: Loop) -> list[Any]:
    """All that a course has come to."""
    notes, main = cast(Records, loop.notes), loop.scheduler.main
    leaks = [[leak.device, leak.holder, leak.certainty, *leak.rates.values()] for leak in loop.leaks()]
    return [
        [round(place, 2) for place in taken(loop)],
        [loop.found, len(notes.asked), notes.asked[:6], notes.stopped, notes.libraries.count(True)],
        [main.names_all("cpu"), main.covers_growth("cpu"), round(main.now, 2)],
        leaks,
    ]
