"""Growth over the whole run on one scale: by the counters at every mark, and by censuses where they ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType

from memtriage.account.census import CensusView
from memtriage.diagnose.code_cache import fills_with_code
from memtriage.diagnose.growth.census_plan import PLANS, affordable, next_census
from memtriage.diagnose.growth.counter import CODE, NO_ESTIMATE, WITNESSES, Counter
from memtriage.diagnose.growth.holders import DataGrowth, HolderGrowth, data_growths, growths, not_shown
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.diagnose.growth.proof import BY_TIME, POLICY, Proof
from memtriage.diagnose.growth.trend import GrowthEstimate
from memtriage.model.position import Scale, TrainingPosition
from memtriage.process.stdlib import time
from memtriage.session.schedule.investigation import Investigation, Investigator

_LOOK_AGAIN = 1.1
"""The counters are estimated again when there are so many times as many readings: a millisecond for each."""


class ScaleScheduler:
    """Follows the counters from mark to mark and takes the censuses that name and prove what grows.

    Attributes:
        counters: by name. Beside devices, `shared`: resident memory that is shared or mapped, in which
            malloc's counter has no part; `host`, the resident set; and `code`, generated code.
        investigation: what its censuses showed.
        marks: how many it was given.

    Args:
        scale: what marks of this kind are counted in.
        investigator: takes the censuses.
        look: asked for the ledger while a census is open.
        found: called whenever what is known to grow may have changed.
    """

    def __init__(
        self,
        scale: Scale,
        investigator: Investigator,
        look: Callable[[CensusView], None],
        found: Callable[[], None],
    ) -> None:
        self.counters: dict[str, Counter] = {}
        self.investigation = Investigation(scale)
        self.marks = 0
        self._plan = PLANS[scale]
        self._proof = BY_TIME if scale == "second" else POLICY
        self._investigator = investigator
        self._look = look
        self._found = found
        self._begun = self._here = 0.0
        self._distance = 1.0
        self._look_at = float(self._plan.first)
        self._due = float(self._plan.first)
        self._suspicion: GrowthEstimate | None = None
        self._onset: float | None = None
        self._open = False
        self._grows = False
        self._granted = self._granted_at = 0.0
        self._spent_s = 0.0
        self._breath = 0.0
        self._told = False

    @property
    def scale(self) -> Scale:
        return self.investigation.scale

    def at_mark(
        self, position: TrainingPosition, values: Mapping[str, int], *, censuses: bool = True
    ) -> None:
        """Take the counters of a mark, and a census where it is time for one.

        Args:
            position: where training stands.
            values: bytes by counter; what could not be read is left out.
            censuses: take any. Otherwise the counters are followed alone.
        """
        here = self._place(position)
        if self.marks == 0 and self.scale == "second":
            self._begun, self._due = here, here + self._plan.first
        self._distance, self._here = max(here - self._here, 1e-3), here
        self.marks += 1
        for name, value in values.items():
            self.counters.setdefault(name, Counter(name)).add(here, value)
        if not censuses:
            return
        if self.marks >= self._look_at:
            self._look_at = max(self.marks + 2, self.marks * _LOOK_AGAIN)
            self._plan_next()
        if here >= self._due and self._affordable(position.time_s):
            self.census(position)
        wanted = self._suspicion is not None and self.investigation.lacks_sites
        if wanted and self._affordable(position.time_s):
            self._investigator.record(math.ceil((self._due - here) / self._distance))

    def census(self, position: TrainingPosition, frames: Sequence[FrameType] | None = None) -> CensusPoint:
        """Take a census now, with the ledger.

        Args:
            position: where training stands.
            frames: as `Investigator.census` has them, where memory has run out: in the middle of a position,
                so that the census counts for the one that has begun.
        """
        here = self._place(position)
        if frames is not None and self.scale != "second":
            here += 1
        if self.investigation.taken and here <= self.investigation.taken[-1]:
            return self._investigator.census(here, lambda view, _: self._look(view), frames)
        started, self._due = time.perf_counter(), 2 * here + self._plan.gap  # should this one fail
        try:
            point = self._investigator.follow(self.investigation, here, self._look, frames)
        finally:
            took = time.perf_counter() - started
            self._spent_s += took
            # Two censuses with no work of the program between them show nothing.
            self._breath = here + took if self.scale == "second" else 0.0
        if frames is None:
            self._plan_next()
            self._tell()
        return point

    def _tell(self) -> None:
        """Tell what grows, and once more when nothing does any longer."""
        grows = bool(self.investigation.growing() or self.investigation.data)
        if grows or self._told:
            self._found()
        self._told = grows

    def end(self, position: TrainingPosition, frames: Sequence[FrameType] | None) -> None:
        """Take one more census of a program that has ended, where something is suspected to grow.

        Args:
            position: where training stood.
            frames: of the exception that ended it, innermost first; None when it came to its end.
        """
        here = self._place(position)
        taken = self.investigation.taken
        if self._suspicion is not None and taken and here > taken[-1]:
            self._investigator.follow(self.investigation, here, self._look, frames, between=False)

    def _place(self, position: TrainingPosition) -> float:
        """Where the program stands; of time, what it had for itself."""
        if self.scale == "second":
            return position.time_s - self._spent_s
        return position.backwards if self.scale == "microbatch" else position.step

    def growths(self) -> list[HolderGrowth]:
        """Return the holders that grew up to the last census, and what that amounts to, largest first."""
        followed = self.investigation
        return growths(
            followed.growing(),
            followed.counter_of,
            self.contradicts,
            followed.period,
            self._here,
            self._confirms,
            self._ended,
            self._proof,
        )

    def data(self) -> list[DataGrowth]:
        """Return the containers of ordinary data that grew, and what that amounts to, largest first."""
        return data_growths(
            self.investigation.data.values(),
            self.contradicts,
            self._here,
            self._confirms,
            self._ended,
            self._proof,
        )

    def contradicts(self, counter: str, rate: float, since: float) -> bool:
        """As `Counter.contradicts`; False where there is no such counter."""
        found = self.counters.get(counter)
        return found is not None and found.contradicts(rate, since)

    def fills_with_code(self, since: float) -> bool:
        """Whether what malloc's counter shows since a position is a cache of generated code that fills."""
        memory, code = self.counters.get("cpu"), self.counters.get(CODE)
        return (
            memory is not None
            and code is not None
            and fills_with_code(memory.track.points(), code.track.points(), since)
        )

    def held_rate(self, counter: str) -> float | None:
        """Return bytes a position by which all that has a holder grew while a counter did; None if not known.

        Where no two censuses fall into the time since its onset, which is an estimate, those before count if
        the counter rose as fast then.
        """
        found, investigation = self.counters[counter].estimate(), self.investigation
        since = investigation.held_rate(counter, found.onset or 0.0)
        seen = [position for position, _ in investigation.totals]
        if since is None and seen and self.counters[counter].rose(found.rate, seen[0], seen[-1]):
            return investigation.held_rate(counter, 0.0)
        return since

    def _confirms(self, counter: str, rate: float) -> bool:
        found = self.counters.get(counter)
        return found is not None and found.confirms(rate)

    def _ended(self, counter: str, rate: float) -> bool:
        found = self.counters.get(counter)
        return found is not None and found.ended(rate)

    # --- when the next census is due ------------------------------------------------------------------------

    def _plan_next(self) -> None:
        periods = [one.estimate().period or 0.0 for name, one in self.counters.items() if name != CODE]
        self.investigation.period = max(periods, default=0.0) or None
        held, data = self.growths(), self.data()
        proofs = [*(one.proof for one in held), *(one.proof for one in data)]
        suspicions = [*self._by_counters(held, data), *_by_holders(proofs)]
        self._suspicion = max(
            suspicions, key=lambda suspicion: (suspicion.state == "growing", suspicion.rate), default=None
        )
        proven = [proof.since for proof in proofs if proof.certainty == "proven"]
        settled = self._suspicion is None and bool(proven)
        self._grows = bool(proven) or (self._suspicion is not None and self._suspicion.state == "growing")
        if self._suspicion is not None:
            # Growth that comes and goes is one suspicion, and its censuses get farther and farther apart.
            onset = self._suspicion.onset or 0.0
            self._onset = onset if self._onset is None else min(onset, self._onset)
            self._suspicion = replace(self._suspicion, onset=self._onset)
            if not self._open and self._here >= 2 * self._granted_at:
                # A false alarm early in the run must not use up what a leak later in it needs.
                self._granted = self._here if self._granted_at else onset
                self._granted_at = self._here
        else:
            self._onset = min(proven, default=None)
        self._open = self._suspicion is not None
        found = self._suspicion or GrowthEstimate("growing" if settled else "flat", onset=self._onset)
        shown = not not_shown(held, self._confirms) and not not_shown(data, self._confirms)
        due = next_census(self.investigation.taken, found, settled, self._plan, self._begun, shown=shown)
        self._due = max(self._breath, due)

    def _by_counters(
        self, held: Sequence[HolderGrowth], data: Sequence[DataGrowth]
    ) -> Iterator[GrowthEstimate]:
        """What counters show and no proven growth explains.

        The resident set rises with each page that is touched for the first time. It asks for censuses only
        where it surely grows, and much more than malloc's counter does.
        """
        proven = [(growth.device, growth.proof) for growth in held] + [("cpu", one.proof) for one in data]
        for name, counter in self.counters.items():
            found = counter.estimate()
            known = sum(p.rate for where, p in proven if where == name and p.certainty == "proven")
            grows = found.state in ("growing", "undecided") and name not in WITNESSES
            if grows and known < _EXPLAINED * found.rate:
                yield found
        resident = self._estimate("host")
        known = max(self._estimate("cpu").rate, sum(p.rate for _, p in proven if p.certainty == "proven"))
        if resident.state == "growing" and known < _EXPLAINED * resident.rate:
            yield resident

    def _estimate(self, name: str) -> GrowthEstimate:
        counter = self.counters.get(name)
        return NO_ESTIMATE if counter is None else counter.estimate()

    def _affordable(self, elapsed_s: float) -> bool:
        return affordable(
            self.investigation.taken,
            self._granted if self._onset is not None else None,
            self._spent_s,
            elapsed_s,
            self._plan,
            grows=self._grows,
        )


_EXPLAINED = 0.5
"""Part of a counter's rate that proven growth has to explain before the search goes on no longer."""


def _by_holders(proofs: Sequence[Proof]) -> Iterator[GrowthEstimate]:
    """Growth up to the last census that no counter contradicts, and that is not proven yet."""
    for proof in proofs:
        if proof.certainty == "suspected":
            yield GrowthEstimate("undecided", proof.rate, onset=proof.since)
