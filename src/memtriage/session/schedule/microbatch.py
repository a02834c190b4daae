"""Growth within an optimizer step: from micro-batch to micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

from memtriage.diagnose.growth.census_plan import PLANS
from memtriage.diagnose.growth.holders import HolderGrowth, growths
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.diagnose.growth.marks import (
    POLICY,
    Series,
    period_within_step,
    policy_for,
    went_on_within_step,
)
from memtriage.model.position import TrainingPosition
from memtriage.process.stdlib import time
from memtriage.session.schedule.investigation import Investigation, Investigator


@dataclass(frozen=True, slots=True)
class WithinStepPolicy:
    """When censuses are taken from micro-batch to micro-batch.

    Attributes:
        first: micro-batch of the first census, if the step is long enough: gradients exist, and three rises
            show.
        censuses: censuses in one step: three intervals.
        tries: most investigations in a run. Otherwise memory that rises in every step and is freed at its end
            (a pipeline that fills) would be investigated in each. The first may take any time; another one
            only begins while censuses are within the budget for a known leak (`CensusPolicy.leak_free_s`).
        kept: completed investigations that are kept.
    """

    first: int = 4
    censuses: int = 4
    tries: int = 3
    kept: int = 8


WITHIN_STEP: Final = WithinStepPolicy()


class MicrobatchScheduler:
    """Follows counters from backward to backward of one step, and takes four censuses if they rise.

    Attributes:
        done: completed investigations, latest last.

    Args:
        investigator: takes the censuses.
        report: called whenever what is known to grow may have changed.
    """

    def __init__(self, investigator: Investigator, report: Callable[[], None]) -> None:
        self.done: list[Investigation] = []
        self._investigator = investigator
        self._report = report
        self._current: Investigation | None = None
        self._due = 0
        self._gap = self._period = 1
        self._step = 0
        self._series: dict[str, Series] = {}
        self._period_of_last_step: int | None = None
        self._tries = 0
        self._spent_s = 0.0

    @property
    def investigating(self) -> bool:
        """Whether an investigation is open."""
        return self._current is not None

    def at_mark(self, position: TrainingPosition, values: Mapping[str, int]) -> None:
        """Take the counters at the end of a backward, and a census if one is due."""
        if position.step != self._step:
            self._abandon()  # the step ended before its last census
            self._step = position.step
            self._period_of_last_step = self._period_of_rise()
            self._series.clear()
        for counter, value in values.items():
            self._series.setdefault(counter, Series()).add(position.microbatch, value)
        if self._current is None:
            self._begin_if_rising(position)
        elif position.microbatch >= self._due:
            if self._fell_since(self._current.taken[0]):
                self._abandon()  # backwards of one micro-batch: the same instant of two is compared
                self._begin_if_rising(position)
            else:
                self._follow(self._current, position)
        else:
            self._investigator.record(self._due - position.microbatch)

    def step_completes(self, position: TrainingPosition) -> None:
        """Note which growth has stopped, of this step or an earlier one."""
        for investigation in self.done:
            same_step = investigation.step == position.step - 1
            since = investigation.taken[-1] if same_step else POLICY.microbatch_warm_up
            for growth in self.growths(investigation):
                series = self._series.get(growth.device)
                if series is not None and went_on_within_step(series, since, growth.proof.rate) is False:
                    investigation.stopped.add(growth.holding.key)

    def interrupted(self, position: TrainingPosition, frames: Sequence[FrameType]) -> CensusPoint:
        """Take the last census of the current investigation, in the middle of the failing operation."""
        investigation = self._current
        assert investigation is not None
        self._current = None
        self.done = [*self.done, investigation][-WITHIN_STEP.kept :]
        microbatch = max(position.into_step, investigation.taken[-1]) + 1
        return self._investigator.follow(investigation, microbatch, None, frames, training=position)

    def growths(self, investigation: Investigation) -> list[HolderGrowth]:
        """Return what grew in one of `done`. Its counters caused it, so none contradicts."""
        return growths(
            investigation.growing(),
            investigation.counter_of,
            lambda counter, rate, since: False,
            investigation.period,
        )

    def _begin_if_rising(self, position: TrainingPosition) -> None:
        if self._tries >= WITHIN_STEP.tries or any(done.growing() for done in self.done):
            return  # following a known leak again would show nothing new
        if self._tries and not self._affordable(position.time_s):
            return
        usual, more = position.microbatches_per_step, WITHIN_STEP.censuses - 1
        first, period = WITHIN_STEP.first, 1
        if 0 < usual < first + more:
            # A step that is too short for a rise and all censuses is judged by the step before it.
            period = self._period_of_last_step or 1
            first = max(1, usual - more * period)
            if self._period_of_last_step is None or usual < 1 + more * period:
                return
        if position.microbatch < first:
            return
        if first >= WITHIN_STEP.first:
            risen = self._period_of_rise()
            if risen is None:
                return
            period = risen
            if usual and position.microbatch + more * period > usual:
                return
        self._tries += 1
        # The next census is at the same instant of a later micro-batch, however many backwards one has. If
        # possible, the first interval is twice as long: sites of objects are recorded in it, of nodes later.
        room = not usual or position.microbatch + (more + 1) * period <= usual
        self._period, self._gap = period, (2 if room else 1) * period
        self._current = Investigation("microbatch", step=position.step, period=period)
        self._follow(self._current, position)

    def _follow(self, investigation: Investigation, position: TrainingPosition) -> None:
        started = time.thread_time()
        self._investigator.follow(investigation, position.microbatch, training=position)
        self._spent_s += time.thread_time() - started
        self._due = position.microbatch + self._gap
        remaining, self._gap = self._gap, self._period
        if len(investigation.taken) >= WITHIN_STEP.censuses:
            self._current = None
            self.done = [*self.done, investigation][-WITHIN_STEP.kept :]
            if investigation.growing():
                self._report()
        else:
            self._investigator.record(remaining)

    def _affordable(self, elapsed_s: float) -> bool:
        plan = PLANS["microbatch"]
        return self._spent_s <= plan.leak_free_s + plan.leak_cost * elapsed_s

    def _abandon(self) -> None:
        if self._current is not None:
            self._current = None
            self._investigator.stop()

    def _fell_since(self, microbatch: float) -> bool:
        """Return whether every counter has fallen below its value at a backward of this step."""
        fell = []
        for series in self._series.values():
            before = [
                value
                for position, value in zip(series.positions, series.values, strict=True)
                if position <= microbatch
            ]
            after = series.after(microbatch).values
            fell.append(min(after, default=0) < before[-1] if before else True)
        return all(fell)

    def _period_of_rise(self) -> int | None:
        """Return after how many backwards a counter rises each time; None if none does."""
        periods = [
            period_within_step(series.values, policy_for(counter)) for counter, series in self._series.items()
        ]
        return min((period for period in periods if period is not None), default=None)
