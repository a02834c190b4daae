"""The investigation under way and those that are done, whatever scale they are on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from memtriage.account.census import View
from memtriage.diagnose.leaks import CensusPoint, growth_between
from memtriage.model.position import Scale, TrainingPosition
from memtriage.session.investigation import Investigation, Investigator
from memtriage.session.schedule.policy import SCHEDULE


class Investigations:
    """Runs one investigation at a time and keeps what they found.

    Attributes:
        open: the one under way.
        done: those that came to their second census, latest last.

    Args:
        investigator: takes the censuses.
        look: asked for the ledger while a census is open.
        found: called whenever what is known to grow may have changed.
    """

    def __init__(
        self, investigator: Investigator, look: Callable[[View], None], found: Callable[[], None]
    ) -> None:
        self.open: Investigation | None = None
        self.done: list[Investigation] = []
        self._investigator = investigator
        self._look = look
        self._found = found
        self._quiet_until_s: dict[Scale, float] = {}

    def on(self, scale: Scale) -> Iterator[Investigation]:
        """Return those on a scale that are done, latest first."""
        return (done for done in reversed(self.done) if done.scale == scale)

    def census(self, position: float, frames: Sequence[FrameType] | None = None) -> CensusPoint:
        """Take a census outside of investigations, with the ledger; `frames` as for `Investigator.census`."""
        return self._investigator.census(position, self._look, frames)

    # --- from suspicion to second census --------------------------------------------------------------------

    def may_begin(self, scale: Scale, position: TrainingPosition) -> bool:
        """Return whether enough time has passed since the last false alarm on this scale."""
        return position.time_s >= self._quiet_until_s.get(scale, 0.0)

    def begin(
        self,
        scale: Scale,
        position: TrainingPosition,
        due: float,
        *,
        period: int = 1,
        baseline: CensusPoint | None = None,
    ) -> None:
        """Take the first census; the second is due at position `due` of the scale."""
        here = position.on(scale)
        begun = self.open = self._investigator.begin(scale, here)
        begun.due, begun.step, begun.period, begun.baseline = due, position.step, period, baseline
        self._investigator.record(math.ceil(due - here))

    def is_due(self, position: TrainingPosition) -> bool:
        """Return whether it is time for the second census; records allocation sites shortly before."""
        assert self.open is not None
        remaining = self.open.due - position.on(self.open.scale)
        if remaining > 0:
            self._investigator.record(math.ceil(remaining))
        return remaining <= 0

    def conclude(self, position: TrainingPosition, frames: Sequence[FrameType] | None = None) -> CensusPoint:
        """Take the second census of the one under way.

        Args:
            position: where training stands.
            frames: as `Investigator.census` has them. Inside a failing allocation the ledger of that instant
                is wanted too.
        """
        investigation, self.open = self.open, None
        assert investigation is not None
        look = None if frames is None else self._look
        here = position.on(investigation.scale)
        point = self._investigator.conclude(investigation, here, look, frames)
        self.done = [*self.done, investigation][-SCHEDULE.kept :]
        if investigation.growths() or investigation.host:
            investigation.verify_at = here + 2 * (here - investigation.points[0].position)
            self._found()
        else:
            self._quiet_until_s[investigation.scale] = self._investigator.seconds / SCHEDULE.census_share
        return point

    def abandon(self) -> None:
        """Drop the one under way, if there is one."""
        if self.open is not None:
            self.open = None
            self._investigator.stop()

    # --- what became of those that are done -----------------------------------------------------------------

    def verify(self, investigation: Investigation, position: float) -> None:
        """Take a third census, once: what fills to a bound has stopped by now, what leaks has not."""
        investigation.verify_at = None
        too_slow = self._investigator.seconds > SCHEDULE.verify_at_most_s
        if not too_slow and position > investigation.points[-1].position:
            investigation.points.append(self.census(position))
            self._found()

    def clear_earlier(self) -> None:
        """Clear what earlier ones saw grow and the latest on this scale did not: a cache that filled."""
        latest = self.done[-1]
        growing = {growth.key for growth in growth_between(latest.points[0], latest.points[-1])}
        for done in self.on(latest.scale):
            if done is not latest:
                done.stopped.update(growth.key for growth in done.growths() if growth.key not in growing)

    def forget(self, scale: Scale) -> None:
        """Drop everything on a scale that turned out to mean nothing."""
        if self.open is not None and self.open.scale == scale:
            self.abandon()
        before = len(self.done)
        self.done = [done for done in self.done if done.scale != scale]
        if len(self.done) < before:
            self._found()
