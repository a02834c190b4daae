"""Feed counters to the evidence of a run, and take the censuses that name and prove what grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final

from memtriage.account.census import CensusView
from memtriage.diagnose.growth.attribution import attribute
from memtriage.diagnose.growth.census_plan import GAP, Suspicion, affordable, next_census, suspicion_of
from memtriage.diagnose.growth.evidence import CONFIRMING, ENOUGH_MARKS, Comparison, Evidence
from memtriage.model.census import Census
from memtriage.model.position import Scale, TrainingPosition
from memtriage.session.schedule.investigation import Following, Investigator
from memtriage.session.schedule.microbatch import MicrobatchScheduler

_SCALES: Final[Mapping[str, Scale]] = {"step": "step", "backward": "microbatch", "time": "second"}
_AGAIN: Final = 1.2
"""Counters are estimated again when there are this many times as many readings. That takes some ms."""
_LIBRARIES_AFTER: Final = 2
"""Censuses of certain growth that named no holder, after which libraries are searched for one."""


class CensusScheduler:
    """Follows the counters from mark to mark, and decides when a census is worth its time.

    Censuses over the run are taken at the ends of steps; without steps at those of backwards, and without
    both over time, once what the program does repeats: while it loads and builds, all grows.

    Args:
        evidence: gets the readings; the investigator adds the censuses.
        take_ledgers: called while a census is open.
        report: called whenever what is known to grow may have changed.
    """

    def __init__(
        self,
        evidence: Evidence,
        investigator: Investigator,
        take_ledgers: Callable[[CensusView], None],
        report: Callable[[], None],
    ) -> None:
        self.within_steps = MicrobatchScheduler(evidence, investigator, report)
        self._evidence = evidence
        self._investigator = investigator
        self._take_ledgers = take_ledgers
        self._report = report
        self._following = Following()
        self._suspicion = Suspicion()
        self._comparison: Comparison | None = None
        self._latest: tuple[float, Mapping[str, int]] = (0.0, {})
        self._estimate_at = self._census_due = math.inf
        self._wants_sites = False  # something is suspected to grow whose allocation site is unknown
        self._asks_for_sites = False
        self._reported_growth = False
        self._now, self._spacing = 0.0, 1.0

    def growing(self) -> dict[str, float]:
        """Return by device how many bytes per step (backward, second) its counter grows so far."""
        return {
            name: counter.growth.recent if counter.growth.state == "growing" else 0.0
            for name, counter in self._evidence.main.counters.items()
            if name not in CONFIRMING and counter.growth.state != "too_short"
        }

    def at_mark(
        self, name: str, position: TrainingPosition, values: Mapping[str, int], *, works: bool = True
    ) -> None:
        """Take the counters of a `step`, `backward` or `time` mark, and a census if one is due.

        Args:
            values: bytes by counter; what could not be read is left out.
            works: whether what the program does repeats. Until then it is followed over time, without a
                census.
        """
        if name == "time" and (position.step or position.backwards):
            return
        if name == "backward" and position.microbatch:  # else gradients that are no micro-batch
            self.within_steps.at_mark(position, values)
        comparison = self._evidence.run[_SCALES[name]]
        if name == "time":
            # At the last mark functions may have returned: it says nothing about what they were doing.
            comparison.read(*self._latest)
        at, before = self._at(comparison.scale, position), comparison.now
        if name == "time":
            self._latest = at, values
        elif name == "step" or self._evidence.run["step"].marks < ENOUGH_MARKS:  # then only steps are judged
            comparison.read(at, values)
        if name == "backward" and (position.step > 0 or self.within_steps.due):
            return
        self._now, self._spacing = at, max(1e-3, at - before)
        if not works:
            return
        if comparison is not self._comparison:  # the first step comes after some backwards
            self._comparison = comparison
            if name == "time":
                comparison.begins = before or at
            self._plan_next(comparison)
        paid = affordable(comparison, self._suspicion, self._investigator.spent_s, position.time_s)
        census = at >= self._census_due and paid
        if comparison.marks >= self._estimate_at or (census and not self._asks_for_sites):
            self._plan_next(comparison)
        if at >= self._census_due and paid:
            self.census(position)
        asked, self._asks_for_sites = self._asks_for_sites, paid and self._wants_sites
        if self._asks_for_sites:
            remaining = math.ceil((self._census_due - at) / self._spacing)
            period = (self._suspicion.period or 0) / self._spacing
            self._investigator.record(remaining, period, again=self._following.recorded > 0)
        elif asked:
            self._investigator.stop()  # the suspicion is over, or that census is not to be taken

    def _at(self, scale: Scale, position: TrainingPosition) -> float:
        if scale == "second":
            return position.time_s - self._investigator.paused_s
        return position.backwards if scale == "microbatch" else position.step

    def census(self, position: TrainingPosition, frames: Sequence[FrameType] | None = None) -> Census:
        """Take a census now, whether one is due or not, with the ledger.

        Args:
            frames: of the error, innermost first, if memory has run out; empty inside the failing allocation.
                None for a census between steps.
        """
        if frames is not None and self.within_steps.due:
            return self.within_steps.interrupted(position, frames)
        self._evidence.run["second"].read(*self._latest)
        comparison = self._comparison or self._evidence.main
        at = self._at(comparison.scale, position)
        self._census_due = 2 * at + GAP[comparison.scale]  # if this one fails
        census = self._investigator.follow(self._following, position, self._take_ledgers, frames)
        self._asks_for_sites = False
        if frames is None:
            self._plan_next(comparison)
            if self._suspicion.grows or self._reported_growth:
                self._report()
            self._reported_growth = self._suspicion.grows
        return census

    def end(self, position: TrainingPosition, frames: Sequence[FrameType] | None) -> None:
        """Take one more census of a program that has ended, if it tells more of what grows.

        Args:
            frames: of the exception that ended it, innermost first; None when it completed.
        """
        main = self._evidence.main
        self._plan_next(main)
        taken = main.positions
        if self._suspicion.grows and (not taken or self._at(main.scale, position) > taken[-1]):
            self._investigator.follow(self._following, position, self._take_ledgers, frames, between=False)

    def _plan_next(self, comparison: Comparison) -> None:
        """Decide whether something is suspected to grow, and when the next census is due."""
        self._estimate_at = max(comparison.marks + 2, comparison.marks * _AGAIN)
        self._suspicion = suspicion_of(comparison, attribute(comparison))
        self._following.in_libraries = self._suspicion.named_nothing >= _LIBRARIES_AFTER
        self._census_due = next_census(comparison, self._suspicion)
        self._wants_sites = self._suspicion.open and self._following.lacks_sites
        if self._wants_sites and not self._asks_for_sites:  # sites are recorded until then
            self._census_due = max(self._census_due, self._now + 2 * self._spacing)
