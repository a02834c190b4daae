"""Decide whether a holder's growth is a leak, from its size at several censuses and the counters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import sqrt
from statistics import median
from typing import Final

from memtriage.model.findings import Certainty


@dataclass(frozen=True, slots=True)
class ProofPolicy:
    """Thresholds for calling a holder's growth proven.

    Attributes:
        intervals: a holder must have grown in this many intervals between censuses, up to the last census.
        more_intervals: the same for a holder that was smaller again before, whose size may just vary: a size
            that varies at random rises three times in a row in 1 of 24 cases, five times in 1 of 720.
        short: an interval shorter than this part of the longest one is joined with the one before it, if
            enough others are left: in so short a time a single rise decides.
        share: each interval must show at least this part of the holder's rate.
        begun: if the first interval has less than this part of the others' rate, growth began in the middle
            of it. It is left out if enough others follow, and never counts for the rate.
        slows: if the last interval has less than this part of the first one's rate, growth may be ending.
        fills: the same if every interval is slower than the one before it. A cache that fills gets fewer and
            fewer new entries; a leak is faster now and slower then.
        contradicts: a counter contradicts a holder if it does not show even this part of the holder's rate.
        differs: growth stopped in the last interval if that falls short of what is expected by more than each
            of three: so many times the usual difference, `exact`, and the smallest earlier rise (what comes
            now and then may be about to come).
        exact: part of what is expected.
        whole: two censuses must be at least this part of a period apart for a rate over whole periods.
        ages: if no counter shows its growth, a holder is taken to grow after the last census for as long as
            this part of the time over which it was seen to grow.
    """

    intervals: int = 3
    more_intervals: int = 5
    short: float = 0.25
    share: float = 0.3
    begun: float = 0.9
    slows: float = 0.5
    fills: float = 0.6
    contradicts: float = 0.5
    differs: float = 4.0
    exact: float = 0.05
    whole: float = 0.9
    ages: float = 0.25


POLICY: Final = ProofPolicy()
BY_TIME: Final = ProofPolicy(share=0.15, slows=0.35, fills=0.5, exact=0.5)
"""Over seconds: a program is as fast as its machine and its input let it be."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a holder's growth is worth.

    Attributes:
        certainty: `proven`, `suspected`, or None: it is no leak.
        rate: bytes per position over the intervals that count.
        intervals: how many in a row it grew over.
        since: position at which they begin.
        reason: why it is not proven; None where it is.
        stopped: it is proven, but the last interval shows less than those before, by more than these differ:
            the position in it at which it may have come to an end. None where it shows enough.
        uneven: it is not proven only because its intervals differ too much.
        fills: it is not proven only because it slows down in each of them.
    """

    certainty: Certainty | None
    rate: float
    intervals: int
    since: float
    reason: str | None = None
    stopped: float | None = None
    uneven: bool = False
    fills: bool = False

    def suspected(self, reason: str) -> Proof:
        """Return the same growth as a suspicion, for a reason."""
        return replace(self, certainty="suspected", reason=reason)


def prove(
    sizes: Sequence[tuple[float, float]],
    contradicted: Callable[[float, float], bool] = lambda rate, since: False,
    policy: ProofPolicy = POLICY,
    period: float | None = None,
    fell: bool = False,
) -> Proof:
    """Judge the growth of one holder, which must be the same object at every census.

    Args:
        sizes: position and bytes it keeps alive, by census, oldest first; positions and bytes rise.
        contradicted: given a rate in bytes per position and a position, says whether a counter that is able
            to see this memory shows that nothing grew at such a rate since then.
        policy: thresholds.
        period: positions from rise to rise, where growth is periodic: the rate is over whole periods.
        fell: at some census before these it kept less than at the one before that.
    """
    needed = policy.more_intervals if fell else policy.intervals
    points = list(sizes)
    rates = _rates(points)
    if not rates:
        return Proof(None, 0.0, 0, points[-1][0] if points else 0.0, "it did not grow up to the last census")
    while len(rates) > needed and rates[0] < policy.begun * median(rates[1:]):
        del points[0], rates[0]
    fills = _fills(_rates(_evenly(points, needed)), policy)
    points = _joined(points, needed, policy)
    rates = _rates(points)
    late = len(rates) > 1 and rates[0] < policy.begun * median(rates[1:])
    start, whole = points[0][0], _rate(points[late:], period, policy)
    grown = len(rates)
    if contradicted(policy.contradicts * whole, start):
        return Proof(None, whole, grown, start, "the counters show that memory did not grow with it")
    if grown < needed:
        reason = f"it grew over {grown} of {needed} intervals"
        return Proof("suspected", whole, grown, start, reason)
    if _is_uneven(rates, whole, policy) and _is_uneven(_rates(_evenly(points, needed)), whole, policy):
        reason = "it grows more and more slowly, or unevenly"
        return Proof("suspected", whole, grown, start, reason, uneven=True)
    if fills:
        return Proof("suspected", whole, grown, start, "it grows more and more slowly", fills=True)
    return Proof("proven", whole, grown, start, stopped=_stopped(points[late:], sizes, policy))


def _is_uneven(rates: Sequence[float], whole: float, policy: ProofPolicy) -> bool:
    return min(rates) < policy.share * whole or rates[-1] < policy.slows * rates[0]


def _fills(rates: Sequence[float], policy: ProofPolicy) -> bool:
    """Whether each rate is lower than the one before, and the last one much lower than the first."""
    falls = all(after < before for before, after in pairwise(rates))
    return falls and rates[-1] < policy.fills * rates[0]


def _evenly(points: Sequence[tuple[float, float]], intervals: int) -> list[tuple[float, float]]:
    """Return the censuses nearest to the ends of `intervals` equal intervals, so that no single rise decides;
    all of them if that leaves too few.

    More censuses must not make a proof harder than fewer would.
    """
    (first, _), (last, _) = points[0], points[-1]
    wanted = (first + number * (last - first) / intervals for number in range(intervals + 1))
    nearest = {min(points, key=lambda point: abs(point[0] - place)) for place in wanted}
    return sorted(nearest) if len(nearest) > intervals else list(points)


def _rates(points: Sequence[tuple[float, float]]) -> list[float]:
    return [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(points)]


def _stopped(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], policy: ProofPolicy
) -> float | None:
    """Return where growth may have ended, if the last interval falls short by more than those before differ.

    Growth at random times differs from what is expected by the root of that, so these roots are compared.

    Args:
        points: those of `sizes` that are compared.
        sizes: of all censuses. What comes between two of these at least may be about to come.
        policy: thresholds.
    """
    before, (start, least), (end, most) = points[:-1], points[-2], points[-1]
    rate = (before[-1][1] - before[0][1]) / (before[-1][0] - before[0][0]) if len(before) > 2 else 0.0
    if rate <= 0:
        return None
    off = [(b[1] - a[1] - rate * (b[0] - a[0])) ** 2 / (rate * (b[0] - a[0])) for a, b in pairwise(before)]
    expected = rate * (end - start)
    differ = sqrt(sum(off) / (len(off) - 1) * expected)
    smallest = min(b[1] - a[1] for a, b in pairwise(sizes[:-1]))
    enough = expected - max(policy.differs * differ, policy.exact * expected, smallest)
    return start + (most - least) / rate if most - least < enough else None


def _joined(
    sizes: Sequence[tuple[float, float]], needed: int, policy: ProofPolicy
) -> list[tuple[float, float]]:
    """Leave out censuses that make intervals too short to compare, the last one never."""
    points = list(sizes)
    while len(points) - 1 > needed:
        apart = [after[0] - before[0] for before, after in pairwise(points)]
        shortest = min(range(len(apart)), key=lambda at: apart[at])
        if apart[shortest] >= policy.short * max(apart):
            break
        del points[shortest or 1]
    return points


def _rate(points: Sequence[tuple[float, float]], period: float | None, policy: ProofPolicy) -> float:
    """Bytes a position between the two points whose distance is nearest to whole periods; else in all."""
    ends = points[0], points[-1]
    if period is not None:
        least_apart = policy.whole * period
        pairs = [pair for pair in combinations(points, 2) if pair[1][0] - pair[0][0] >= least_apart]
        ends = min(pairs, key=lambda pair: _misses_period(pair[1][0] - pair[0][0], period), default=ends)
    (begin, least), (end, most) = ends
    return (most - least) / (end - begin)


def _misses_period(distance: float, period: float) -> tuple[float, float]:
    """By which part a distance misses whole periods; of equal ones the longer comes first."""
    return round(abs(distance / period - round(distance / period)) / (distance / period), 3), -distance
