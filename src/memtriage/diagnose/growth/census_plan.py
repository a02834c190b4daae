"""Decide when the next census is due, and whether it is affordable. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from memtriage.diagnose.growth.attribution import (
    ACCOUNTS,
    INTERVALS,
    OPEN,
    Rise,
    other_growth,
    part_of_other_memory,
)
from memtriage.diagnose.growth.evidence import CONFIRMING, HEAP, Comparison, Counter
from memtriage.model.position import Scale

FIRST: Final[Mapping[Scale, float]] = {"step": 3, "microbatch": 8, "second": 5.0}
"""Positions until the first census, while nothing is suspected. What training needs from the start exists by
then. Where the first step comes after fewer backwards, steps are followed; by so many seconds most programs
have loaded their data and built a model, of which no census is of use."""
GAP: Final[Mapping[Scale, float]] = {"step": 2, "microbatch": 2, "second": 0.15}
"""Shortest distance between censuses."""
WIDENS: Final = 4.0
"""While nothing is open, each census is at so many times the position of the one before: four censuses in a
run of 1,000 steps, eight in one of 300,000."""
GOES_ON: Final = 0.2
"""The distance between censuses of a proven leak that no counter shows is this part of the time over which it
was seen to grow: less than that after which it would be too old to count."""
FREE_S: Final = 1.0
"""Seconds of the processor that all censuses together may take in any run."""
COST: Final = 0.02
"""Part of the time that they may take beyond that."""
TO_PROVE: Final = INTERVALS + 1
"""Censuses that are taken at any cost since a suspicion began: so many intervals prove growth."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What seems to grow, and whether another census would tell more of it.

    Attributes:
        open: only more censuses can settle it.
        grows: it is open, or something is proven to grow.
        unseen: what is proven is shown by no counter, so that only censuses can tell whether it goes on.
        since: position at which it began.
        period: positions from rise to rise; None where growth does not come in single rises.
        named_nothing: censuses since then that named no holder.
    """

    open: bool = False
    grows: bool = False
    unseen: bool = False
    since: float = 0.0
    period: float | None = None
    named_nothing: int = 0


def suspicion_of(comparison: Comparison, rises: Sequence[Rise]) -> Suspicion:
    """Return what a comparison makes suspect so far.

    A counter is suspect as long as proven holders explain less than most of its growth, and objects that wait
    for the cyclic collector less than a part of it. The resident set rises with each page that is touched for
    the first time: it only calls for censuses if it certainly grows, malloc's counter does not, and memory
    that no census lists may.
    """
    proven = [rise for rise in rises if not rise.reasons]
    counters, known = comparison.counters, defaultdict[str, float](float)
    for rise in proven:
        known["cpu" if rise.counter in ("host", HEAP) else rise.counter] += rise.rate
    begin, other = other_growth(comparison, INTERVALS - 1), other_growth(comparison)
    known["host"] = known[HEAP] = max(known["cpu"], counters["cpu"].growth.rate if "cpu" in counters else 0.0)
    for name, growth in other.items():
        known[name] += growth.rate
    suspects = []
    for name, counter in counters.items():
        may_grow = counter.rises and name not in CONFIRMING
        if counter.growth.state == "growing":
            may_grow |= name == HEAP or (name in ("host", "shared") and _tells_more(comparison, counter))
        unexplained = known[name] < ACCOUNTS * counter.growth.rate
        if may_grow and unexplained and not comparison.awaits_collector(name, counter.grown):
            suspects.append(counter)
    few = [rise for rise in rises if rise.reasons in (("few",), ("aged",))]
    begun = [counter.growth.onset or 0.0 for counter in suspects] + [rise.since for rise in few]
    begun += [growth.onset or 0.0 for growth in begin.values()]
    since = min(begun or [rise.since for rise in proven] or [0.0])
    after = [at for at in comparison.positions if at >= since]
    return Suspicion(
        open=bool(suspects or few or begin.keys() - other.keys()),
        grows=bool(suspects or few or proven or begin),
        unseen=any(not rise.share for rise in proven) or bool(other),
        since=since,
        period=max((c.growth.period for c in suspects if c.growth.period is not None), default=None),
        named_nothing=0 if rises or all(c.growth.state != "growing" for c in suspects) else len(after),
    )


def _tells_more(comparison: Comparison, counter: Counter) -> bool:
    """Whether one more census may show that pages which are touched are memory that no census lists.

    There is one since they certainly grow, from one to the next they rise by a part of what counts, and such
    memory took a part of what they rose by so far.
    """
    onset = counter.growth.onset or 0.0
    last = max((at for at in comparison.positions if at >= onset), default=None)
    if last is None:
        return True
    part = part_of_other_memory(comparison, counter)
    hardly = counter.rise(last, comparison.now)[0] < counter.policy.settles / INTERVALS
    return not hardly and (part is None or part >= OPEN)


def next_census(comparison: Comparison, suspicion: Suspicion) -> float:
    """Return the position from which on the next census is due; it may be in the past.

    While nothing grows, distances grow with the run, so that a holder that no counter sees is still compared
    over several intervals. Under suspicion the first follows soon, and each distance doubles, up to a third
    of the time since growth began: three intervals fit into as long a time again. What is periodic is
    compared whole periods apart. Once growth is explained, its counter shows whether it goes on, and
    distances grow with the run again.
    """
    gap, taken = GAP[comparison.scale], comparison.positions
    if not taken or taken[-1] <= comparison.begins:
        return comparison.begins + (gap if suspicion.open else FIRST[comparison.scale])
    last = taken[-1]
    if suspicion.open:
        since = sum(position >= suspicion.since for position in taken)
        doubled = gap * 2.0 ** max(0, since - 1)
        distance = max(gap, min(doubled, (last - suspicion.since) / INTERVALS))
        if suspicion.period is not None:
            distance = max(1.0, round(distance / suspicion.period)) * suspicion.period
        return last + distance
    if suspicion.unseen:
        return last + max(gap, GOES_ON * (last - suspicion.since))
    return last + max(gap, (WIDENS - 1) * (last - comparison.begins))


def affordable(comparison: Comparison, suspicion: Suspicion, spent_s: float, elapsed_s: float) -> bool:
    """Whether one more census fits what all may cost of the processor, in so many seconds of the watch."""
    taken = comparison.positions
    since = sum(position >= suspicion.since for position in taken)
    if not taken or (suspicion.open and since < TO_PROVE):
        return True
    # Much later, one confirms what is proven (a list of an epoch grows evenly until that ends), or sees what
    # began meanwhile.
    later = comparison.now - comparison.begins >= WIDENS * (taken[-1] - comparison.begins)
    if later and (suspicion.open or (suspicion.grows and since <= TO_PROVE)):
        return True
    return spent_s * (1 + 1 / len(taken)) <= FREE_S + COST * elapsed_s
