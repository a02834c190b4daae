"""Growth within an optimizer step: from micro-batch to micro-batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memtriage.diagnose.growth import (
    POLICY,
    Series,
    period_within_step,
    policy_for,
    went_on_within_step,
)
from memtriage.model.position import TrainingPosition
from memtriage.session.schedule.investigations import Investigations
from memtriage.session.schedule.policy import SCHEDULE


class MicrobatchScheduler:
    """Follows counters from backward to backward of one step.

    A first census at the fourth micro-batch, a second at the eighth; sooner in short steps.
    """

    def __init__(self, investigations: Investigations) -> None:
        self._investigations = investigations
        self._step = 0
        self._series: dict[str, Series] = {}
        self._period_of_last_step: int | None = None
        self._tries = 0

    def at_mark(self, position: TrainingPosition, values: Mapping[str, int]) -> None:
        """Take the counters at the end of a backward, and a census where it is time for one."""
        if position.step != self._step:
            self._step = position.step
            self._period_of_last_step = self._period()
            self._series.clear()
        for counter, value in values.items():
            self._series.setdefault(counter, Series()).add(position.microbatch, value)
        if self._may_begin_after_open(position):
            self._begin_where_it_rises(position)

    def step_completes(self, position: TrainingPosition) -> None:
        """Clear what had grown within this step, or within an earlier one, and stopped."""
        for investigation in self._investigations.on("microbatch"):
            same_step = investigation.step == position.step - 1
            since = investigation.points[-1].position if same_step else POLICY.microbatch_warm_up
            for growth in investigation.growths():
                series = self._series.get(growth.group.device)
                if series is not None and went_on_within_step(series, since, growth.rate) is False:
                    investigation.stopped.add(growth.key)

    def _may_begin_after_open(self, position: TrainingPosition) -> bool:
        """Take the investigation under way further; return whether another may begin at this mark."""
        investigations = self._investigations
        if investigations.open is None:
            return True
        if investigations.open.scale != "microbatch":
            return False
        if position.step > investigations.open.step:
            investigations.abandon()  # the step ended before its second census
            return False
        if not investigations.is_due(position):
            return False
        if self._fell_since(investigations.open.points[0].position):
            investigations.abandon()  # backwards of one micro-batch: the same instant of two is compared
            return True
        investigations.conclude(position)
        return False

    def _begin_where_it_rises(self, position: TrainingPosition) -> None:
        investigations = self._investigations
        if self._tries >= SCHEDULE.tries_within_steps or not investigations.may_begin("microbatch", position):
            return
        if any(done.growths() for done in investigations.on("microbatch")):
            return  # following a known leak again would show nothing new
        usual = position.microbatches_per_step
        if 0 < usual < SCHEDULE.second_microbatch:
            # Steps too short to see a rise and still take two censuses are judged by the step before.
            period = self._period_of_last_step or 1
            first, second = usual - max(1, (usual - max(2, usual // 2)) // period) * period, usual
        else:
            period, first, second = 1, SCHEDULE.first_microbatch, SCHEDULE.second_microbatch
        if position.microbatch < first:
            return
        if first >= SCHEDULE.first_microbatch or self._period_of_last_step is None:
            risen = self._period()
            if risen is None:
                return
            period = risen
        if usual and position.microbatch + max(2, period) > usual:
            return
        self._tries += 1
        # At the same instant of a later micro-batch, however many backwards one has.
        ahead = max(2, second - position.microbatch)
        due = position.microbatch + math.ceil(ahead / period) * period
        investigations.begin("microbatch", position, due, period=period)

    def _fell_since(self, microbatch: float) -> bool:
        """Return whether no counter stayed at or above what it was at a backward of this step."""
        fell = []
        for series in self._series.values():
            before = [v for p, v in zip(series.positions, series.values, strict=True) if p <= microbatch][-1:]
            fell.append(min(series.after(microbatch).values, default=0) < before[0] if before else True)
        return all(fell)

    def _period(self) -> int | None:
        found = [period_within_step(s.values, policy_for(key)) for key, s in self._series.items()]
        return min((period for period in found if period is not None), default=None)
