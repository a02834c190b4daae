"""Finds the cheapest set of changes with which a program fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from memtriage.model.plan import PassedOver, RungOutcome
from memtriage.planning.changes import Change, Changes, Rung
from memtriage.planning.evaluate import FINENESS, Evaluated, Evaluator
from memtriage.planning.facts import Facts
from memtriage.prediction.build import BuildError

LEAST_SAVING: Final = FINENESS
"""What saves no more is within the fineness of the figures, and counts as no help."""


@dataclass(slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        changes: in order of cost.
        evaluated: the program with all of them.
        cheaper: the next cheaper set, which does not fit; None where no change is needed or nothing fits.
        passed_over: rungs that are not among the changes.
    """

    changes: Changes
    evaluated: Evaluated
    cheaper: Changes | None = None
    passed_over: list[PassedOver] = field(default_factory=list)


class LadderSearch:
    """A search over a ladder.

    Climbs from the cheapest rung to the dearest: on each, the way that saves most is simulated together with
    the changes so far, and kept if it lowers what the program needs. Rungs that did not help are tried again
    after each that did, because the peak has moved. As soon as the program fits, each rung, the dearest
    first, is taken out again if the others suffice, or else taken in the mildest way that does. So no rung
    is climbed while cheaper ones suffice, and no change in the result can be left out.
    """

    def __init__(self, evaluator: Evaluator, rungs: Sequence[Rung], requested: frozenset[str]) -> None:
        self._evaluator = evaluator
        self._rungs = rungs
        self._requested = requested
        self._order = {rung.name: number for number, rung in enumerate(rungs)}
        self._tracks: dict[str, Changes] = {}
        self._aside: list[tuple[Rung, tuple[Changes, ...]]] = []
        self._passed: dict[str, PassedOver] = {}

    def run(self, facts: Facts) -> SearchResult:
        """Search.

        Raises:
            BuildError: the program itself cannot be traced.
        """
        changes: Changes = ()
        for rung in self._rungs:
            if self._evaluator.of(changes).fits:
                self._pass(rung, "not needed", "cheaper changes are enough")
                continue
            changes = self._climb(rung, facts, changes)
        result = SearchResult(changes, self._evaluator.of(changes))
        if result.evaluated.fits and changes:
            changes = self._relaxed(changes)
            result = SearchResult(changes, self._evaluator.of(changes), self._cheaper(changes))
        for change in changes:
            for rung in self._rungs:
                if rung.name in change.displaces & self._tracks.keys():
                    self._pass(
                        rung, "not needed", f"{change.rung} takes its place", self._passed[rung.name].saves
                    )
        taken = {change.rung for change in changes}
        result.passed_over = [self._passed[rung.name] for rung in self._rungs if rung.name not in taken]
        return result

    def _climb(self, rung: Rung, facts: Facts, changes: Changes) -> Changes:
        if rung.on_request and rung.name not in self._requested:
            self._pass(rung, "on request", f"{rung.on_request}, so is tried only when asked for")
            return changes
        offer = rung.offer(facts)
        if isinstance(offer, str):
            self._pass(rung, "does not apply", offer)
            return changes
        tried = self._try(rung, offer, changes)
        if tried is None:
            return changes
        changes = tried
        for other, tracks in list(self._aside):
            if self._evaluator.of(changes).fits:
                break
            if any(other.name in change.displaces for change in changes):
                continue
            again = self._try(other, tracks, changes)
            changes = changes if again is None else again
        return changes

    def _try(self, rung: Rung, tracks: tuple[Changes, ...], changes: Changes) -> Changes | None:
        """The changes with the way of this rung that saves most; None where it does not help."""
        before = self._evaluator.of(changes).peak.needs
        best: tuple[int, Changes, Changes] | None = None
        failure = ""
        for track in tracks:
            candidate = self._with(changes, track[-1])
            try:
                needs = self._evaluator.of(candidate).peak.needs
            except BuildError as error:
                failure = str(error)
                continue
            if best is None or needs < best[0]:
                best = needs, candidate, track
        self._aside = [entry for entry in self._aside if entry[0] is not rung]
        if best is None:
            self._pass(rung, "fails", f"the changed program cannot be traced: {failure}")
            return None
        needs, candidate, track = best
        if before - needs <= LEAST_SAVING:
            self._aside.append((rung, tracks))
            peak = self._evaluator.of(changes).peak
            why = "it raises the peak" if needs - before > LEAST_SAVING else "it does not lower the peak"
            self._pass(rung, "no help", f"{why}, which is in {peak.phase}", before - needs)
            return None
        self._tracks[rung.name] = track
        self._pass(rung, "not needed", "it saves memory, but the plan fits without it", before - needs)
        return candidate

    def _relaxed(self, changes: Changes) -> Changes:
        """Each rung, the dearest first, taken out if the rest fits, or else taken as mildly as fits."""
        for change in reversed(changes):
            fewer = tuple(other for other in changes if other is not change)
            changes = fewer if self._fits(fewer) else self._mildest(changes, change)
        return changes

    def _mildest(self, changes: Changes, change: Change) -> Changes:
        track = self._tracks[change.rung]
        lowest, highest = 0, track.index(change)
        while lowest < highest:
            middle = (lowest + highest) // 2
            if self._fits(self._with(changes, track[middle])):
                highest = middle
            else:
                lowest = middle + 1
        return self._with(changes, track[highest])

    def _cheaper(self, changes: Changes) -> Changes:
        """The changes with the dearest rung taken more mildly, or not at all."""
        last = changes[-1]
        track = self._tracks[last.rung]
        place = track.index(last)
        milder = self._with(changes, track[place - 1]) if place else None
        if milder is not None and self._works(milder):
            return milder
        return changes[:-1]

    def _with(self, changes: Changes, change: Change) -> Changes:
        """The changes with one in the place of that of its rung, and of those that it displaces."""
        gone = change.displaces | {change.rung}
        kept = [other for other in changes if other.rung not in gone]
        return tuple(sorted((*kept, change), key=lambda kept_change: self._order[kept_change.rung]))

    def _works(self, changes: Changes) -> bool:
        try:
            self._evaluator.of(changes)
        except BuildError:
            return False
        return True

    def _fits(self, changes: Changes) -> bool:
        return self._works(changes) and self._evaluator.of(changes).fits

    def _pass(self, rung: Rung, outcome: RungOutcome, why: str, saves: int | None = None) -> None:
        self._passed[rung.name] = PassedOver(
            rung=rung.name, playbook=rung.playbook, outcome=outcome, why=why, saves=saves
        )
