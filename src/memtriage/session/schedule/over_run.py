"""Growth over the whole run: from step to step, or by time where no steps are seen."""

from __future__ import annotations

from collections.abc import Mapping

from memtriage.diagnose.growth import Series, policy_for, suspects
from memtriage.diagnose.leaks import CensusPoint
from memtriage.model.position import Scale, TrainingPosition
from memtriage.session.schedule.investigations import Investigations
from memtriage.session.schedule.policy import SCHEDULE


class OverRunScheduler:
    """Follows counters from mark to mark: a first census at the suspicion, a second some positions later.

    All of that again when the run is twice as long and still grows.

    Attributes:
        series: the marks' values of each counter. Counters are devices, and `shared`: resident memory that is
            shared or mapped, in which malloc's counter has no part.

    Args:
        scale: what marks of this kind are counted in.
        gap: positions from the first census to the second.
        investigations: those of all scales.
    """

    def __init__(self, scale: Scale, gap: int, investigations: Investigations) -> None:
        self.series: dict[str, Series] = {}
        self._scale: Scale = scale
        self._gap = gap
        self._investigations = investigations

    def at_mark(self, position: TrainingPosition, values: Mapping[str, int]) -> None:
        """Take the counters of a mark, and a census where it is time for one."""
        for counter, value in values.items():
            self.series.setdefault(counter, Series()).add(position.on(self._scale), value)
        investigations = self._investigations
        if investigations.open is not None:
            if investigations.open.scale == self._scale and investigations.is_due(position):
                investigations.conclude(position)
                investigations.clear_earlier()
        elif not self._takes_planned_census(position):
            # Every series is asked: each keeps count of when it was looked at.
            suspected = [each for each, series in self.series.items() if suspects(series, policy_for(each))]
            if suspected and investigations.may_begin(self._scale, position) and not self._known(position):
                due = position.on(self._scale) + self._gap
                investigations.begin(self._scale, position, due, baseline=self._baseline())

    def _takes_planned_census(self, position: TrainingPosition) -> bool:
        """Take a census that no suspicion asks for; return whether one was due."""
        return False

    def _baseline(self) -> CensusPoint | None:
        return None

    def _known(self, position: TrainingPosition) -> bool:
        """Return whether a leak is known already: following it again would show nothing new.

        When the run is twice as long it may be another that grows by now.
        """
        here = position.on(self._scale)
        return any(
            here < 2 * done.points[-1].position and done.growths()
            for done in self._investigations.on(self._scale)
        )


class StepScheduler(OverRunScheduler):
    """Follows counters from step to step, with a census early in the run and a third in each investigation.

    Attributes:
        baseline: the census at the end of the policy's `baseline_step`.
    """

    def __init__(self, investigations: Investigations) -> None:
        super().__init__("step", SCHEDULE.step_gap, investigations)
        self.baseline: CensusPoint | None = None

    def _takes_planned_census(self, position: TrainingPosition) -> bool:
        latest = next(self._investigations.on("step"), None)
        if latest is not None and latest.verify_at is not None and position.step >= latest.verify_at:
            self._investigations.verify(latest, position.step)
            return True
        if position.step == SCHEDULE.baseline_step and self.baseline is None:
            self.baseline = self._investigations.census(position.step)
            return True
        return False

    def _baseline(self) -> CensusPoint | None:
        return self.baseline


class TimeScheduler(OverRunScheduler):
    """Follows counters by time-based marks, until there is a step or a backward.

    From then on they mean nothing (memory rises within a slow step), and loading and building a model grow.
    """

    def __init__(self, investigations: Investigations) -> None:
        super().__init__("second", SCHEDULE.seconds_gap, investigations)
        self._over = False

    def at_mark(self, position: TrainingPosition, values: Mapping[str, int]) -> None:
        if not self._over:
            super().at_mark(position, values)

    def training_begins(self) -> None:
        """Drop what time-based marks showed before the first backward or step."""
        if not self._over:
            self._over = True
            self.series.clear()
            self._investigations.forget("second")
