"""Growth within an optimizer step: from micro-batch to micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Final

from memtriage.diagnose.growth.census_plan import COST, TO_PROVE
from memtriage.diagnose.growth.estimate import policy_of
from memtriage.diagnose.growth.evidence import CODE, CONFIRMING, ENOUGH_MARKS, Comparison, Evidence
from memtriage.model.census import Census
from memtriage.model.position import TrainingPosition
from memtriage.session.schedule.investigation import POLICY as FOLLOWED
from memtriage.session.schedule.investigation import Following, Investigator

_TRIES: Final = 3
"""Most investigations in a run. Otherwise memory that rises in every step and is freed at its end (a pipeline
that fills) would be investigated in each."""


class MicrobatchScheduler:
    """Follows counters from backward to backward of one step, and takes four censuses if they rise.

    The first is at the fourth micro-batch if the step is long enough: gradients exist, and three rises show.

    Args:
        evidence: gets readings and censuses of the steps that are investigated, and readings of the step
            after each.
        investigator: takes the censuses.
        report: called whenever what is known to grow may have changed.
    """

    def __init__(self, evidence: Evidence, investigator: Investigator, report: Callable[[], None]) -> None:
        self._evidence = evidence
        self._investigator = investigator
        self._report = report
        self._current: Following | None = None
        self._latest = Following(within_step=True)
        self._known = False  # growth within a step has been found, and goes on
        self._at_first: Mapping[str, int] = {}
        self._comparison: Comparison | None = None
        self._due = 0
        self._gap = self._period = 1
        self._step = self._investigated = -2
        self._longest = FOLLOWED.period * TO_PROVE + 1
        self._recent: dict[str, deque[int]] = {}
        self._period_of_last_step: int | None = None
        self._tries = 0

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
            self._known = self._known and self._period_of_last_step is not None
            self._recent.clear()
            self._comparison = None
        values = {counter: value for counter, value in values.items() if counter != CODE}
        for counter, value in values.items():
            self._recent.setdefault(counter, deque(maxlen=self._longest)).append(value)
        if position.step == self._investigated + 1:
            self._comparison = self._evidence.of_step(position.step)
        if self._comparison is not None:
            self._comparison.read_all(position.microbatch, values)
        if self._current is not None and self._fell(values):
            self._abandon()  # backwards of one micro-batch: the same instant of two is compared
        if self._current is None:
            self._begin_if_rising(position, values)
        elif position.microbatch >= self._due:
            self._follow(self._current, position)
        else:
            self._investigator.record(self._due - position.microbatch)

    def interrupted(self, position: TrainingPosition, frames: Sequence[FrameType]) -> Census:
        """Take the last census of the current investigation, in the middle of the failing operation."""
        following = self._current
        assert following is not None
        self._current = None
        return self._investigator.follow(following, position, None, frames)

    def _begin_if_rising(self, position: TrainingPosition, values: Mapping[str, int]) -> None:
        if self._tries >= _TRIES or self._known:
            return  # following a known leak again would show nothing new
        if self._tries and self._investigator.spent_s > COST.free_s + COST.cost * position.time_s:
            return
        usual, more = position.microbatches_per_step, TO_PROVE - 1
        first, period = TO_PROVE, 1
        if 0 < usual < first + more:
            # A step that is too short for a rise and all censuses is judged by the step before it.
            period = self._period_of_last_step or 1
            first = max(1, usual - more * period)
            if self._period_of_last_step is None or usual < 1 + more * period:
                return
        if position.microbatch < first:
            return
        if first >= TO_PROVE:
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
        again = position.step == self._investigated  # all censuses of a step number holders alike
        earlier = self._latest if again else Following(within_step=True)
        self._latest = self._current = replace(earlier, taken=0, growing=[], first={})
        self._investigated, self._at_first = position.step, values
        self._comparison = self._evidence.of_step(position.step)
        self._follow(self._current, position)

    def _follow(self, following: Following, position: TrainingPosition) -> None:
        self._investigator.follow(following, position)
        self._due = position.microbatch + self._gap
        remaining, self._gap = self._gap, self._period
        if following.taken >= TO_PROVE:
            self._current, self._known = None, bool(following.growing)
            if self._known:
                self._report()
        else:
            self._investigator.record(remaining)

    def _abandon(self) -> None:
        if self._current is not None:
            self._current = None
            self._investigator.stop()

    def _fell(self, values: Mapping[str, int]) -> bool:
        """Return whether every counter of allocated memory is lower than at the first census."""
        both = values.keys() & self._at_first.keys() - CONFIRMING
        return bool(both) and all(values[name] < self._at_first[name] for name in both)

    def _period_of_rise(self) -> int | None:
        """Return after how many backwards a counter rises each time; None if none does."""
        periods = [
            period_of_rise(list(values), policy_of(name).least) for name, values in self._recent.items()
        ]
        return min((period for period in periods if period is not None), default=None)


def period_of_rise(values: Sequence[int], least: float) -> int | None:
    """Return the number of backwards after which a counter is higher each time, within one step; or None.

    1 if every backward ends higher than the one before. More if a micro-batch has several backwards, such as
    one per pipeline stage or one in the fused forward of a head: then the counter goes up and down within a
    micro-batch, and only the same instant of each can be compared.

    Args:
        values: the counter at the ends of backwards of the step. The last few are looked at, never the first
            one, which allocates gradients.
        least: bytes of a rise.
    """
    for period in range(1, FOLLOWED.period + 1):
        needed = (TO_PROVE - 1) * period
        recent = values[max(1, len(values) - max(needed, ENOUGH_MARKS)) :]
        if len(recent) < needed:
            return None
        later = islice(recent, period, None)
        if all(after - before >= least for before, after in zip(recent, later, strict=False)):
            return period
    return None
