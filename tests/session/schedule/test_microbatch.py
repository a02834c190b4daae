"""When four censuses are taken within a step, and when what grew within it has stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.model.position import TrainingPosition
from memtriage.session.schedule.investigation import Investigation, Investigator
from memtriage.session.schedule.microbatch import MicrobatchScheduler
from support.censuses import group, point

MIB = 1 << 20


class Noting(Investigator):
    """Notes when a census is taken and sites are recorded; a list has a MiB for each of `held`'s entries."""

    def __init__(self) -> None:
        super().__init__(None, lambda text: None)
        self.censuses: list[tuple[int, float]] = []
        self.recorded: list[int] = []
        self.stops = 0
        self.grows = True

    def follow(self, investigation: Investigation, position: float, *given: Any, **named: Any) -> CensusPoint:
        held = int(position) if self.grows else 1
        taken = point(position, group("losses[*]", held * MIB, held, token=1))
        investigation.taken.append(position)
        investigation.history.add(taken)
        self.censuses.append((investigation.step, position))
        return taken

    def record(self, remaining: int, period: float | None = None, *, again: bool = False) -> None:
        self.recorded.append(remaining)

    def stop(self) -> None:
        self.stops += 1


class Run:
    """Steps of a program whose counter has these MiB at the end of each backward."""

    def __init__(self) -> None:
        self.investigator = Noting()
        self.reports = 0
        self.scheduler = MicrobatchScheduler(self.investigator, self.report)
        self.usual = 0

    def report(self) -> None:
        self.reports += 1

    def step(self, number: int, mib: Sequence[float], *, completes: bool = True) -> None:
        for microbatch, value in enumerate(mib, 1):
            position = TrainingPosition(step=number, microbatch=microbatch, microbatches_per_step=self.usual)
            self.scheduler.at_mark(position, {"cpu": int(value * MIB)})
        if completes:
            self.usual = len(mib)
            self.scheduler.step_completes(
                TrainingPosition(step=number + 1, microbatch=len(mib), at_step_end=True)
            )

    @property
    def censuses(self) -> list[tuple[int, float]]:
        return self.investigator.censuses


def test_a_rise_over_three_backwards_begins_four_censuses() -> None:
    run = Run()
    run.step(0, range(1, 21))
    # The first backward makes gradients. The first interval is twice as long: its sites can be recorded.
    assert run.censuses == [(0, 4), (0, 6), (0, 7), (0, 8)]
    assert run.investigator.recorded == [2, 1, 1, 1]
    assert (len(run.scheduler.done), run.reports, run.scheduler.investigating) == (1, 1, False)
    assert run.scheduler.done[0].period == 1


@pytest.mark.parametrize(
    "mib",
    [
        pytest.param([5.0] * 20, id="flat"),
        pytest.param([1, 2, 3] * 7, id="up and down"),
        pytest.param([1, 2, 3], id="a short step"),
        pytest.param([5, 1, 2, 1, 2, 1, 2, 1, 2], id="nothing that stays"),
    ],
)
def test_without_a_rise_there_is_no_census(mib: list[float]) -> None:
    run = Run()
    run.step(0, mib)
    assert run.censuses == []


def test_micro_batches_of_two_backwards_are_compared_two_apart() -> None:
    run = Run()
    run.step(0, [batch + 10 * (backward % 2) for batch in range(20) for backward in range(2)])
    (first, *later) = [position for _, position in run.censuses]
    assert [position - first for position in later] == [4, 6, 8]
    assert run.scheduler.done[0].period == 2


def test_an_investigation_ends_with_its_step_or_when_the_counter_has_fallen() -> None:
    run = Run()
    run.step(0, [1, 2, 3, 4, 5], completes=False)
    assert run.scheduler.investigating
    run.step(1, [1.0], completes=False)
    assert (run.scheduler.investigating, run.investigator.stops, run.scheduler.done) == (False, 1, [])
    fell = Run()
    fell.step(0, [1, 2, 3, 4, 5, 1, 1, 1])
    assert (fell.censuses, fell.investigator.stops) == ([(0, 4)], 1)


@pytest.mark.parametrize(
    ("length", "taken"),
    [
        pytest.param(3, [], id="too short for three intervals"),
        pytest.param(4, [1, 2, 3, 4], id="just long enough"),
        pytest.param(6, [3, 4, 5, 6], id="to the end of the step"),
        pytest.param(7, [4, 5, 6, 7], id="no room for a longer interval"),
        pytest.param(8, [4, 6, 7, 8], id="room for one"),
    ],
)
def test_short_steps_are_judged_by_the_step_before(length: int, taken: list[int]) -> None:
    run = Run()
    for step in range(2):
        run.step(step, [10 * step + each for each in range(1, length + 1)], completes=step == 0)
        if step == 0:
            run.censuses.clear()
            run.scheduler.done.clear()
    assert [position for step, position in run.censuses if step == 1] == taken


def test_a_known_leak_is_not_followed_again_and_a_pipeline_three_times() -> None:
    leak = Run()
    for step in range(4):
        leak.step(step, range(1, 21))
    assert {step for step, _ in leak.censuses} == {0}
    pipeline = Run()
    pipeline.investigator.grows = False
    for step in range(5):
        pipeline.step(step, range(1, 21))
    assert len(pipeline.censuses) == 3 * 4
    assert pipeline.reports == 0 and len(pipeline.scheduler.done) == 3


@pytest.mark.parametrize(
    ("later", "grows"),
    [
        pytest.param(range(9, 21), True, id="to the end of the step"),
        pytest.param([8.0] * 12, False, id="not after the last census"),
        pytest.param([8.0] * 2, True, id="too few backwards to tell"),
    ],
)
def test_growth_that_the_rest_of_its_step_does_not_show_has_stopped(
    later: Sequence[float], grows: bool
) -> None:
    run = Run()
    run.step(0, [*range(1, 9), *later])
    (investigation,) = run.scheduler.done
    assert bool(investigation.growing()) == grows
    assert bool(run.scheduler.growths(investigation)) == grows


def test_growth_that_a_later_step_does_not_show_has_stopped() -> None:
    run = Run()
    run.step(0, range(1, 21))
    run.step(1, range(1, 21))
    assert run.scheduler.done[0].growing()
    run.step(2, [20.0] * 20)
    assert not run.scheduler.done[0].growing()


def test_where_memory_runs_out_the_last_census_is_that_of_the_next_backward() -> None:
    run = Run()
    run.step(0, range(1, 7), completes=False)
    assert run.censuses == [(0, 4), (0, 6)]
    run.scheduler.interrupted(TrainingPosition(step=0, microbatch=6), [])
    assert run.censuses[-1] == (0, 7)
    assert len(run.scheduler.done) == 1 and not run.scheduler.investigating
