"""When censuses are taken, and what comes of them: followed by a script of counters and holders."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.diagnose.growth.judged import judge_counter
from memtriage.model.census import HolderGroup
from memtriage.model.judged import Judged
from memtriage.model.units import MIB
from memtriage.session.schedule import scale as scale_module
from memtriage.session.schedule.judgment import judge_devices
from support.censuses import group
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
