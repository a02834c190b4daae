"""When to take a census: the marks of each kind go to the scheduler of their scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final

from memtriage.account.census import CensusView
from memtriage.diagnose.growth.counter import CODE, CONFIRMING
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.model.position import TrainingPosition
from memtriage.session.schedule.investigation import Investigator
from memtriage.session.schedule.microbatch import MicrobatchScheduler
from memtriage.session.schedule.scale import ScaleScheduler

_ENOUGH_MARKS: Final = 12
"""Marks on a scale from which growth can be judged on it: three of warm-up and nine more."""


class CensusScheduler:
    """Passes marks to one scheduler for steps, one for backwards and one for time.

    Censuses are taken on the scale of steps; without steps on that of backwards, and without both on that of
    time.

    Attributes:
        within_steps: follows growth from micro-batch to micro-batch of one step.

    Args:
        investigator, take_ledgers, report: as for `ScaleScheduler`.
    """

    def __init__(
        self,
        investigator: Investigator,
        take_ledgers: Callable[[CensusView], None],
        report: Callable[[], None],
    ) -> None:
        self._steps = ScaleScheduler("step", investigator, take_ledgers, report)
        self._backwards = ScaleScheduler("microbatch", investigator, take_ledgers, report)
        self._time = ScaleScheduler("second", investigator, take_ledgers, report)
        self.within_steps = MicrobatchScheduler(investigator, report)

    @property
    def main(self) -> ScaleScheduler:
        """The scale that growth over the run is judged on: steps if there is one.

        Else backwards or time: the first with enough marks, or the one with more.
        """
        if self._steps.marks:
            return self._steps
        return self._first_with_enough(self._backwards, self._time) or max(
            self._time, self._backwards, key=lambda scale: scale.marks
        )

    @property
    def judged_on(self) -> ScaleScheduler:
        """The scale that counters are judged on; for a run of few long steps, its backwards."""
        return self._first_with_enough(self._steps, self._backwards) or self.main

    def _first_with_enough(self, *scales: ScaleScheduler) -> ScaleScheduler | None:
        return next((scale for scale in scales if scale.marks >= _ENOUGH_MARKS), None)

    def growing(self) -> dict[str, float]:
        """Return by device how many bytes per step (backward, second) its counter grows so far."""
        estimates = {
            name: counter.estimate() for name, counter in self.main.counters.items() if name not in CONFIRMING
        }
        return {
            name: estimate.rate if estimate.state == "growing" else 0.0
            for name, estimate in estimates.items()
            if estimate.state != "too_short"
        }

    def at_mark(
        self, name: str, position: TrainingPosition, values: Mapping[str, int], *, works: bool = True
    ) -> None:
        """Take the counters of a `step`, `backward` or `time` mark, and a census if one is due.

        Args:
            name: of the mark.
            position: where training stands.
            values: bytes by counter; what could not be read is left out.
            works: whether what the program does repeats. Until then counters are followed, without a census.
        """
        if name == "time":
            if position.step == 0 and position.backwards == 0:
                self._time.at_mark(position, values, censuses=works)
        elif name == "backward":
            self.within_steps.at_mark(
                position, {counter: value for counter, value in values.items() if counter != CODE}
            )
            censuses = position.step == 0 and not self.within_steps.investigating
            self._backwards.at_mark(position, values, censuses=censuses)
        else:
            self.within_steps.step_completes(position)
            self._steps.at_mark(position, values)

    def census(self, position: TrainingPosition, frames: Sequence[FrameType] | None = None) -> CensusPoint:
        """Take a census now, whether one is due or not, with the ledger.

        Args:
            position: where training stands.
            frames: of the error, innermost first, if memory has run out; empty inside the failing allocation.
                None for a census between steps.
        """
        if frames is not None and self.within_steps.investigating:
            return self.within_steps.interrupted(position, frames)
        return self.main.census(position, frames)
