"""When four censuses are taken within a step, and when what grew within it has stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import pytest

from memtriage.diagnose.growth.evidence import Evidence
from memtriage.model.census import Census, HolderGroup
from memtriage.model.evidence import Situation
from memtriage.model.position import TrainingPosition
from memtriage.model.units import MIB
from memtriage.session.schedule.investigation import Following, Investigator
from memtriage.session.schedule.microbatch import MicrobatchScheduler
from support.censuses import group
from support.judged import judge
from support.simulated import StandInInvestigator

LOSSES = "losses[*]"


class Noting(StandInInvestigator):
    """Notes when a census is taken and sites are recorded; a list has a MiB for each of its entries.

    Attributes:
        entries_at: their number, by micro-batch.
    """

    def __init__(self) -> None:
        super().__init__(seconds=0.0)
        self.entries_at: Callable[[int], int] = lambda microbatch: microbatch
        self.microbatch = 0
        self.censuses: list[tuple[int, int]] = []
        self.recorded: list[int] = []
        self.stops = 0

    def groups(self) -> list[HolderGroup]:
        held = self.entries_at(self.microbatch)
        return [group(LOSSES, held * MIB, held, token=1, device="cuda:0")]

    def follow(self, following: Following, position: TrainingPosition, *args: Any, **named: Any) -> Census:
        self.microbatch = position.microbatch
        taken = super().follow(following, position, *args, **named)
        last = self.took[-1][1]
        self.censuses.append((position.step, int(last.at("microbatch"))))
        following.growing = [seen for seen in last.holders if seen.storages > 1]
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
        self.evidence = Evidence()
        self.investigator.observed = self.evidence.add
        self.scheduler = MicrobatchScheduler(
            self.evidence, cast(Investigator, self.investigator), self._report
        )
        self.usual = 0

    def _report(self) -> None:
        self.reports += 1

    def step(self, number: int, mib: Sequence[float], *, completes: bool = True) -> None:
        for microbatch, value in enumerate(mib, 1):
            position = TrainingPosition(step=number, microbatch=microbatch, microbatches_per_step=self.usual)
            self.scheduler.at_mark(position, {"cuda:0": int(value * MIB), "host": 500 * MIB})
        self.usual = len(mib) if completes else self.usual

    @property
    def censuses(self) -> list[tuple[int, int]]:
        return self.investigator.censuses

    @property
    def leaks(self) -> list[tuple[str | None, int | None]]:
        """What is judged to grow, with its rate, once the run has ended."""
        self.evidence.add(Situation(position=TrainingPosition(step=9)))
        return [(leak.holder, leak.bytes_per_microbatch) for leak in judge(self.evidence).findings]


def test_a_rise_over_three_backwards_begins_four_censuses() -> None:
    run = Run()
    run.step(0, range(1, 21))
    # The first backward makes gradients. The first interval is twice as long: its sites can be recorded.
    assert run.censuses == [(0, 4), (0, 6), (0, 7), (0, 8)]
    assert run.investigator.recorded == [2, 1, 1, 1]
    assert (run.reports, run.scheduler.due) == (1, [])
    assert len(run.evidence.steps) == 1
    assert run.leaks == [(LOSSES, MIB)]


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


def test_an_investigation_ends_with_its_step_or_when_the_counter_has_fallen() -> None:
    run = Run()
    run.step(0, [1, 2, 3, 4, 5], completes=False)
    assert run.scheduler.due
    run.step(1, [1.0], completes=False)
    assert (bool(run.scheduler.due), run.investigator.stops, run.reports) == (False, 1, 0)
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
    run.investigator.entries_at = lambda microbatch: 1  # or a leak would be known by then
    for step in range(2):
        run.step(step, [10 * step + each for each in range(1, length + 1)], completes=step == 0)
    assert [position for step, position in run.censuses if step == 1] == taken


def test_a_known_leak_is_not_followed_again_while_it_goes_on() -> None:
    leak = Run()
    for step in range(4):
        leak.step(step, range(1, 21))
    assert {step for step, _ in leak.censuses} == {0}
    leak.step(4, [1.0] * 20)  # it has ended
    leak.step(5, range(1, 21))
    assert {step for step, _ in leak.censuses} == {0, 5}


def test_a_pipeline_that_fills_in_each_step_is_followed_three_times() -> None:
    pipeline = Run()
    pipeline.investigator.entries_at = lambda microbatch: 1
    for step in range(5):
        pipeline.step(step, range(1, 21))
    assert len(pipeline.censuses) == 3 * 4
    assert (pipeline.reports, pipeline.leaks) == (0, [])


def test_backwards_of_one_micro_batch_are_not_taken_for_growth() -> None:
    """Its first backwards look like growth. When the counter has fallen, the step is followed again."""
    run = Run()
    run.investigator.entries_at = lambda backward: 1 + backward // 5
    run.step(0, [batch + 10 * backward for batch in range(12) for backward in range(5)])
    (first, *later) = [position for _, position in run.censuses]
    assert first == 4
    assert [b - a for a, b in pairwise(later)] == [10, 5, 5]
    assert run.leaks == [(LOSSES, pytest.approx(MIB / 5, rel=0.1))]


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
    assert bool(run.leaks) == grows


def test_growth_that_the_next_step_does_not_show_has_stopped() -> None:
    run = Run()
    run.step(0, range(1, 21))
    assert run.leaks
    run.step(1, [20.0] * 20)
    assert not run.leaks


def test_where_memory_runs_out_the_last_census_is_that_of_the_next_backward() -> None:
    run = Run()
    run.step(0, range(1, 7), completes=False)
    assert run.censuses == [(0, 4), (0, 6)]
    run.scheduler.interrupted(TrainingPosition(step=0, microbatch=6), [])
    assert run.censuses[-1] == (0, 7)
    assert not run.scheduler.due
