"""Growth over the whole run on one scale: counters at every mark, censuses if they are suspicious."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Final

from memtriage.account.census import CensusView
from memtriage.diagnose.code_cache import fills_with_code
from memtriage.diagnose.growth.census_plan import PLANS, affordable, next_census
from memtriage.diagnose.growth.counter import CODE, CONFIRMING, NO_ESTIMATE, Counters, WatchedCounter
from memtriage.diagnose.growth.holders import (
    DataGrowth,
    HolderGrowth,
    at_counters_rate,
    data_growths,
    growths,
    not_shown,
)
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.diagnose.growth.pauses import Pauses
from memtriage.diagnose.growth.proof import BY_TIME, POLICY, Proof
from memtriage.diagnose.growth.trend import GrowthEstimate
from memtriage.model.position import Scale, TrainingPosition
from memtriage.process.stdlib import time
from memtriage.session.schedule.investigation import Investigation, Investigator


@dataclass(frozen=True, slots=True)
class SuspicionPolicy:
    """When the counters are estimated again, and when a suspicion ends.

    Attributes:
        estimate_again: estimate again when there are this many times as many readings. An estimate takes 1 ms
            per counter.
        explained: a suspicion ends when proven growth explains this part of the counter's rate.
        named: all of a counter's rise between censuses counts as having a holder if this part has one: malloc
            rounds up, and a census counts requested bytes.
        named_over: least intervals between these censuses.
        work: on the scale of time, least seconds of the program's own work between two censuses, as a part of
            the seconds that the first took. Less work shows nothing; with more, a program of a few seconds
            would end before four censuses.
    """

    estimate_again: float = 1.1
    explained: float = 0.5
    named: float = 0.7
    named_over: int = 2
    work: float = 0.1


SUSPICION: Final = SuspicionPolicy()


class ScaleScheduler:
    """Follows the counters from mark to mark and takes the censuses that name and prove what grows.

    A position is a number of steps, of backwards, or of seconds without the censuses' pauses. A program that
    works at fixed times makes up for these pauses; then positions at the end include them.

    Attributes:
        counters: by name. In addition to devices, `shared`: resident memory that is shared or mapped, which
            malloc does not count; `host`: the resident set; and `code`: generated code.
        investigation: what its censuses showed.
        marks: number of marks so far.

    Args:
        scale: what marks of this kind are counted in.
        investigator: takes the censuses.
        take_ledgers: called while a census is open.
        report: called whenever what is known to grow may have changed.
    """

    def __init__(
        self,
        scale: Scale,
        investigator: Investigator,
        take_ledgers: Callable[[CensusView], None],
        report: Callable[[], None],
    ) -> None:
        self.counters = Counters()
        self.investigation = Investigation(scale)
        self.marks = 0
        self._plan = PLANS[scale]
        self._proof = BY_TIME if scale == "second" else POLICY
        self._investigator = investigator
        self._take_ledgers = take_ledgers
        self._report = report
        self._reported_growth = False
        # Positions of the first mark and of the latest one, and the distance of the last two.
        self._began = self._now = 0.0
        self._spacing = 1.0
        # When to act next: the number of marks for an estimate, the position for a census.
        self._estimate_at = float(self._plan.first)
        self._census_due = float(self._plan.first)
        self._not_before = 0.0
        # The suspicion, the position of its onset, and that from which its censuses count for a proof.
        # Only more censuses can settle what is open: a suspicion, or a proof that no counter confirms.
        self._suspicion: GrowthEstimate | None = None
        self._onset: float | None = None
        self._proof_from = self._proof_begun = 0.0
        self._grows = self._is_open = self._proof_is_old = self._in_libraries = False
        self._asks_for_sites = False
        self._paused_s = self._spent_s = 0.0  # by censuses: wall time, and the processor's
        self._pauses = Pauses()
        self._latest: tuple[float, Mapping[str, int]] = (0.0, {})

    @property
    def scale(self) -> Scale:
        return self.investigation.scale

    @property
    def now(self) -> float:
        """Place on the scale of the latest mark."""
        return self._now

    def at_mark(
        self, position: TrainingPosition, values: Mapping[str, int], *, censuses: bool = True
    ) -> None:
        """Take the counters of a mark, and a census if one is due.

        Args:
            position: where training stands.
            values: bytes by counter; what could not be read is left out.
            censuses: whether to take any. Otherwise only the counters are followed. On the scale of time, the
                program's own work then has not begun.
        """
        now = self._on_scale(position)
        if self.scale == "second":
            if not censuses or self.marks == 0:
                self._began, self._census_due = now, now + self._plan.unasked
            elif self._began == self._now:  # loading and building grow, too
                self.counters.clear()
        self._spacing, self._now = max(now - self._now, 1e-3), now
        self.marks += 1
        at = now
        if self.scale == "second":
            # At the last mark functions may have returned: it says nothing about what they were doing.
            (at, values), self._latest = self._latest, (now, values)
        for name, value in values.items():
            self.counters.setdefault(name, WatchedCounter(name)).add(at, value)
        if not censuses:
            return
        if self.marks >= self._estimate_at:
            self._estimate_at = max(self.marks + 2, self.marks * SUSPICION.estimate_again)
            self._plan_next()
        if now >= self._census_due and self._affordable(position.time_s):
            self.census(position)
        needs_sites = self._suspicion is not None and self.investigation.lacks_sites
        asked, self._asks_for_sites = self._asks_for_sites, needs_sites and self._affordable(position.time_s)
        if self._asks_for_sites:
            remaining = math.ceil((self._census_due - now) / self._spacing)
            period = self.investigation.period
            self._investigator.record(
                remaining,
                None if period is None else period / self._spacing,
                again=self.investigation.recorded > 0,
            )
        elif asked:
            self._investigator.stop()  # the suspicion is over, or that census is not to be taken

    def census(self, position: TrainingPosition, frames: Sequence[FrameType] | None = None) -> CensusPoint:
        """Take a census now, with the ledger.

        Args:
            position: where training stands.
            frames: as for `Investigator.census`, if memory has run out. That is in the middle of a step, so
                the census counts for the step that has begun.
        """
        now = self._on_scale(position)
        if frames is not None and self.scale != "second":
            now += 1
        if self.investigation.taken and now <= self.investigation.taken[-1]:
            return self._investigator.census(now, lambda view, _: self._take_ledgers(view), frames)
        started, worked = time.perf_counter(), time.thread_time()
        self._census_due = 2 * now + self._plan.gap  # if this one fails
        try:
            point = self._investigator.follow(
                self.investigation,
                now,
                self._take_ledgers,
                frames,
                libraries=self._seeks_in_libraries(),
                training=position,
            )
        finally:
            took = time.perf_counter() - started
            self._paused_s += took
            self._spent_s += time.thread_time() - worked
            self._pauses.add(now, took)
            # Two censuses without any work of the program between them show nothing.
            self._not_before = now + SUSPICION.work * took if self.scale == "second" else 0.0
        if frames is None:
            self._plan_next()
            self._report_growth()
        return point

    def _report_growth(self) -> None:
        """Report while something grows, and once more when nothing does any longer."""
        grows = bool(self.investigation.growing() or self.investigation.data.growing())
        if grows or self._reported_growth:
            self._report()
        self._reported_growth = grows

    def end(self, position: TrainingPosition, frames: Sequence[FrameType] | None) -> None:
        """Take one more census of a program that has ended, if only that can settle what grows.

        Args:
            position: where training stood.
            frames: of the exception that ended it, innermost first; None when it completed.
        """
        self._plan_next()
        now = self._on_scale(position)
        taken = self.investigation.taken
        if (self._is_open or self._proof_is_old) and (not taken or now > taken[-1]):
            self._investigator.follow(
                self.investigation,
                now,
                self._take_ledgers,
                frames,
                between=False,
                libraries=self._seeks_in_libraries(),
                training=position,
            )
        if self.scale == "second" and any(
            self._pauses.made_up_for(counter.track.points())
            for name, counter in self.counters.items()
            if name not in CONFIRMING
        ):
            self._include_pauses()

    def _include_pauses(self) -> None:
        """Count all seconds, pauses included, from now on."""
        to = self._pauses.included
        for counter in self.counters.values():
            counter.move(to)
        self.investigation.move(to)
        self._began, self._now, self._paused_s = to(self._began), to(self._now), 0.0
        self._onset = None if self._onset is None else to(self._onset)

    def _on_scale(self, position: TrainingPosition) -> float:
        """Return where training stands on this scale. Time excludes the pauses of censuses."""
        if self.scale == "second":
            return position.time_s - self._paused_s
        return position.backwards if self.scale == "microbatch" else position.step

    # --- what grows -----------------------------------------------------------------------------------------

    def growths(self) -> list[HolderGrowth]:
        """Return the holders that grew up to the last census, with the proof of each, largest first."""
        growing = growths(
            self.investigation.growing(),
            self.investigation.counter_of,
            self.counters.contradicts,
            self.investigation.period,
            self._now,
            self.counters.confirms,
            self.counters.ended,
            self.counters.rose,
            self.counters.flat,
            self.counters.steady,
            self._proof,
        )
        return at_counters_rate(growing, self.counters)

    def data(self) -> list[DataGrowth]:
        """Return the containers of ordinary data that grew, with the proof of each, largest first."""
        growing = data_growths(
            self.investigation.data.growing(),
            self.counters.contradicts,
            self._now,
            self.counters.confirms,
            self.counters.ended,
            self.counters.rose,
            self._proof,
        )
        return at_counters_rate(growing, self.counters)

    def fills_with_code(self, since: float) -> bool:
        """Return whether malloc's counter rises since a position because a cache of generated code fills."""
        memory, code = self.counters.get("cpu"), self.counters.get(CODE)
        return (
            memory is not None
            and code is not None
            and fills_with_code(memory.track.points(), code.track.points(), since)
        )

    def generates_code(self) -> bool:
        """Return whether generated code has grown."""
        code = self.counters.get(CODE)
        points = None if code is None else code.track.points()
        return points is not None and len(points.at) > 1 and bool(points.floors[-1] > points.floors[0])

    def held_rate(self, name: str) -> float | None:
        """Return the rate of everything with a holder while a counter grew; None if not known."""
        return self.investigation.held_rate(name, self._counts_since(name))

    def covers_growth(self, name: str) -> bool:
        """Return whether a counter rose between the censuses about as fast as it is estimated to grow.

        If it rose after them, or much less between them than at other times, growth may have a holder that
        they do not show. True without censuses or without the counter.
        """
        since, positions = self._counts_since(name), [at for at, _ in self.investigation.totals]
        if not positions or name not in self.counters:
            return True
        first = max((at for at in positions if at < since), default=since)
        return self.counters.rose(name, self._estimate(name).rate, first, positions[-1])

    def harmless_rate(self, name: str) -> float:
        """Return the rate of bounded containers, logs and larger content while a counter grew."""
        return self.investigation.harmless_rate(name, self._counts_since(name))

    def _counts_since(self, name: str) -> float:
        """Return the position from which censuses count for the growth of a counter: its onset.

        That is an estimate. If fewer than two censuses follow it, earlier ones count if the counter rose as
        fast then.
        """
        estimate, investigation = self._estimate(name), self.investigation
        onset = estimate.onset or 0.0
        positions = [at for at, _ in investigation.totals]
        if not positions or name not in self.counters or investigation.held_rate(name, onset) is not None:
            return onset
        return 0.0 if self.counters[name].rose(estimate.rate, positions[0], positions[-1]) else onset

    def names_all(self, name: str) -> bool:
        """Return whether all of a counter's rise, from census to census since its onset, has a holder.

        Growth may become faster after the last census, or all the time. Then the counter's rate over the
        whole run is higher than the holder's.
        """
        counter, investigation = self.counters[name], self.investigation
        onset = counter.estimate().onset or 0.0
        held = [(at, totals.get(name, 0)) for at, totals in investigation.totals if at >= onset]
        if len(held) <= SUSPICION.named_over:
            return False
        rise = counter.rise(held[0][0], held[-1][0])
        return rise is not None and held[-1][1] - held[0][1] >= SUSPICION.named * rise > 0

    # --- when the next census is due ------------------------------------------------------------------------

    def _plan_next(self) -> None:
        """Decide whether something is suspected to grow, and when the next census is due."""
        periods = [
            counter.estimate().period or 0.0 for name, counter in self.counters.items() if name != CODE
        ]
        self.investigation.period = max(periods, default=0.0) or None
        held, data = self.growths(), self.data()
        proofs = [*(growth.proof for growth in held), *(growth.proof for growth in data)]
        proven_since = [proof.since for proof in proofs if proof.certainty == "proven"]
        suspicion = max(
            [*self._suspected_by_counters(held, data), *_suspected_by_holders(proofs)],
            key=lambda estimate: (estimate.state == "growing", estimate.rate),
            default=None,
        )
        self._grows = bool(proven_since) or (suspicion is not None and suspicion.state == "growing")
        settled = suspicion is None and bool(proven_since)
        if suspicion is None:
            self._suspicion, self._onset = None, min(proven_since, default=None)
        else:
            self._suspect(suspicion)
        estimate = self._suspicion or GrowthEstimate("growing" if settled else "flat", onset=self._onset)
        confirms = self.counters.confirms
        shown = not not_shown(held, confirms) and not not_shown(data, confirms)
        self._is_open = self._suspicion is not None or (settled and not shown)
        self._proof_is_old = settled and self.scale != "second" and self._is_old(min(proven_since))
        due = next_census(self.investigation.taken, estimate, settled, self._plan, self._began, shown=shown)
        self._census_due = max(self._not_before, due)

    def _is_old(self, since: float) -> bool:
        """Return whether a proof since a position is too old to say anything about the end of the run."""
        last = self.investigation.taken[-1]
        return self._now - last > self._proof.ages * (last - since)

    def _suspect(self, suspicion: GrowthEstimate) -> None:
        """Begin a suspicion, or continue the current one."""
        onset = suspicion.onset or 0.0
        # Growth that comes and goes is one suspicion, with censuses farther and farther apart.
        self._onset = onset if self._onset is None else min(onset, self._onset)
        if self._suspicion is None and self._now >= 2 * self._proof_begun:
            # A false alarm early in the run must not use up the censuses that a later leak needs.
            self._proof_from = self._now if self._proof_begun else onset
            self._proof_begun = self._now
        self._suspicion = replace(suspicion, onset=self._onset)

    def _suspected_by_counters(
        self, held: Sequence[HolderGrowth], data: Sequence[DataGrowth]
    ) -> Iterator[GrowthEstimate]:
        """Yield what counters show and no proven growth explains.

        The resident set rises with each page that is touched for the first time. It only calls for censuses
        if it certainly grows, and much more than malloc's counter does.
        """
        proven = [
            (name, proof.rate)
            for name, proof in [
                *((growth.device, growth.proof) for growth in held),
                *(("cpu", growth.proof) for growth in data),
            ]
            if proof.certainty == "proven"
        ]
        for name, counter in self.counters.items():
            estimate = counter.estimate()
            known = sum(rate for device, rate in proven if device == name)
            grows = estimate.state in ("growing", "undecided") and name not in CONFIRMING
            if grows and known < SUSPICION.explained * estimate.rate:
                yield estimate
        resident = self._estimate("host")
        known = max(self._estimate("cpu").rate, sum(rate for _, rate in proven))
        if resident.state == "growing" and known < SUSPICION.explained * resident.rate:
            yield resident

    def _estimate(self, name: str) -> GrowthEstimate:
        counter = self.counters.get(name)
        return NO_ESTIMATE if counter is None else counter.estimate()

    def _seeks_in_libraries(self) -> bool:
        """Return whether certain growth has no holder yet, so that a table of a library may be the holder."""
        grows = self._suspicion is not None and self._suspicion.state == "growing"
        self._in_libraries = grows and (self._in_libraries or self._named_nothing())
        return self._in_libraries

    def _named_nothing(self) -> bool:
        taken = self.investigation.taken
        return sum(at >= (self._onset or 0.0) for at in taken) > 1 and self.investigation.names_nothing

    def _affordable(self, elapsed_s: float) -> bool:
        return affordable(
            self.investigation.taken,
            self._proof_from if self._is_open else None,
            self._spent_s,
            elapsed_s,
            self._plan,
            grows=self._grows,
        )


def _suspected_by_holders(proofs: Sequence[Proof]) -> Iterator[GrowthEstimate]:
    """Yield growth up to the last census that no counter contradicts, and that is not proven yet."""
    for proof in proofs:
        if proof.certainty == "suspected":
            yield GrowthEstimate("undecided", proof.rate, onset=proof.since)
