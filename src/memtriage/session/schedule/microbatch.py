"""Growth within an optimizer step: from micro-batch to micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final

from memtriage.diagnose.growth.census_plan import COST, FREE_S, TO_PROVE
from memtriage.diagnose.growth.estimate import policy_of
from memtriage.diagnose.growth.evidence import CODE, CONFIRMING, ENOUGH_MARKS, Evidence
from memtriage.model.census import Census
from memtriage.model.position import TrainingPosition
from memtriage.session.schedule.investigation import PERIOD, Following, Investigator

_TRIES: Final = 3
"""Most investigations in a run. Otherwise memory that rises in every step and is freed at its end (a pipeline
that fills) would be investigated in each."""
_LONGEST: Final = PERIOD * TO_PROVE + 1
"""Readings of a counter that show the longest period."""


class MicrobatchScheduler:
    """Follows counters from backward to backward of one step, and takes four censuses if they rise.

    The first is at the fourth micro-batch if the step is long enough: gradients exist, and three rises show.

    Attributes:
        due: micro-batches of the censuses to come, while an investigation is open.

    Args:
        evidence: gets readings of the steps that are investigated, and of the step after each.
        report: called whenever what is known to grow may have changed.
    """

    def __init__(self, evidence: Evidence, investigator: Investigator, report: Callable[[], None]) -> None:
        self._evidence = evidence
        self._investigator = investigator
        self._report = report
        self._following = Following(within_step=True)
        self.due: list[int] = []
        self._known = False  # growth within a step has been found, and goes on
        self._at_first: Mapping[str, int] = {}
        self._step = self._investigated = -2
        self._recent: dict[str, deque[int]] = {}
        self._period_of_last_step: int | None = None
        self._tries = 0

    def at_mark(self, position: TrainingPosition, values: Mapping[str, int]) -> None:
        """Take the counters at the end of a backward, and a census if one is due."""
        if position.step != self._step:
            self._abandon()  # the step ended before its last census
            self._step = position.step
            self._period_of_last_step = self._period_of_rise()
            self._known = self._known and self._period_of_last_step is not None
            self._recent.clear()
        values = {counter: value for counter, value in values.items() if counter != CODE}
        for counter, value in values.items():
            self._recent.setdefault(counter, deque(maxlen=_LONGEST)).append(value)
        if position.step - self._investigated in (0, 1):
            self._evidence.of_step(position.step).read(position.microbatch, values)
        both = values.keys() & self._at_first.keys() - CONFIRMING
        if self.due and both and all(values[name] < self._at_first[name] for name in both):
            self._abandon()  # backwards of one micro-batch: the same instant of two is compared
        if not self.due:
            self._begin_if_rising(position, values)
        if self.due and position.microbatch >= self.due[0]:
            self._investigator.follow(self._following, position)
            self.due.pop(0)
            self._known = not self.due and bool(self._following.growing)
            if self._known:
                self._report()
        if self.due:
            self._investigator.record(self.due[0] - position.microbatch)

    def interrupted(self, position: TrainingPosition, frames: Sequence[FrameType]) -> Census:
        """Take the last census of the current investigation, in the middle of the failing operation."""
        self.due.clear()
        return self._investigator.follow(self._following, position, None, frames)

    def _begin_if_rising(self, position: TrainingPosition, values: Mapping[str, int]) -> None:
        if self._tries >= _TRIES or self._known:
            return  # following a known leak again would show nothing new
        if self._tries and self._investigator.spent_s > FREE_S + COST * position.time_s:
            return
        usual, at, more = position.microbatches_per_step, position.microbatch, TO_PROVE - 1
        # A step that is too short for a rise and all censuses is judged by the step before it, up to its end.
        short = 0 < usual < TO_PROVE + more
        period = self._period_of_last_step if short else self._period_of_rise()
        if period is None or (usual and at + more * period > usual) or (short and at + more * period < usual):
            return
        self._tries += 1
        # The next census is at the same instant of a later micro-batch, however many backwards one has. If
        # possible, the first interval is twice as long: sites of objects are recorded in it, of nodes later.
        room = not usual or at + (more + 1) * period <= usual
        self.due = [at, *(at + (room + n) * period for n in range(1, TO_PROVE))]
        if position.step != self._investigated:  # all censuses of a step number holders alike
            self._following = Following(within_step=True)
        self._following.first.clear()
        self._investigated, self._at_first = position.step, values

    def _abandon(self) -> None:
        if self.due:
            self.due.clear()
            self._investigator.stop()

    def _period_of_rise(self) -> int | None:
        """Return after how many backwards of this step a counter is higher each time; None if none is.

        1 if every backward ends higher than the one before. More if a micro-batch has several backwards, such
        as one per pipeline stage or one in the fused forward of a head: then the counter goes up and down
        within a micro-batch, and only the same instant of each can be compared. The last few backwards are
        looked at, never the first one, which allocates gradients.
        """
        for period in range(1, PERIOD + 1):
            needed = (TO_PROVE - 1) * period
            for name, values in self._recent.items():
                recent = list(values)[max(1, len(values) - max(needed, ENOUGH_MARKS)) :]
                rises = (after - before for before, after in zip(recent, recent[period:], strict=False))
                policy = policy_of(name)
                # In the first backwards libraries take a little each time, until they are set up.
                settles = self._step == 0 and len(values) < ENOUGH_MARKS
                least = policy.settles / ENOUGH_MARKS if settles else policy.least
                if len(recent) >= needed and min(rises) >= least:
                    return period
        return None
