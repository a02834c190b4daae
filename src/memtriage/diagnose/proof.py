"""Does a holder's growth amount to a leak? From its size at several censuses and the counters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from memtriage.diagnose.trend import GrowthEstimate


@dataclass(frozen=True, slots=True)
class ProofPolicy:
    """Thresholds.

    Attributes:
        intervals: intervals in a row, up to the last census, over which a holder must have grown.
        share: part of its rate that each of them must show.
        slows: rate of the last interval, as a part of the first's, below which it may come to an end.
        contradicts: part of the holder's rate that a counter's detection limit must undercut, and that the
            growth it shows must not reach, to contradict.
    """

    intervals: int = 3
    share: float = 0.3
    slows: float = 0.5
    contradicts: float = 0.5


POLICY: Final = ProofPolicy()


@dataclass(frozen=True, slots=True)
class Proof:
    """What a holder's growth is worth.

    Attributes:
        certainty: `proven`, `suspected`, or None: it is no leak.
        rate: bytes a position over the intervals that count.
        intervals: how many in a row it grew over.
        reason: why it is not proven, and what would settle it; None where it is.
    """

    certainty: Literal["proven", "suspected"] | None
    rate: float
    intervals: int
    reason: str | None = None


def prove(
    sizes: Sequence[tuple[float, int]],
    counters: Sequence[tuple[GrowthEstimate, float | None]],
    period: float | None = None,
    policy: ProofPolicy = POLICY,
) -> Proof:
    """Judge one holder, which must be the same object at every census.

    Args:
        sizes: position and bytes it keeps alive, by census, oldest first. Positions must rise.
        counters: estimate and detection limit of every counter that can see this memory. Python's own
            objects have none but the resident set.
        period: positions from rise to rise, where growth is periodic: intervals are whole periods.
        policy: thresholds.
    """
    points = _whole_periods(sizes, period)
    rates = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(points)]
    grown = 0
    for rate in reversed(rates):
        if rate <= 0:
            break
        grown += 1
    if grown == 0:
        return Proof(None, 0.0, 0, "it did not grow up to the last census")
    first, last = points[-1 - grown], points[-1]
    whole = (last[1] - first[1]) / (last[0] - first[0])
    if any(_contradicts(found, limit, whole, policy) for found, limit in counters):
        return Proof(None, whole, grown, "the counters show that memory did not grow with it")
    if grown < policy.intervals:
        return Proof("suspected", whole, grown, f"it grew over {grown} of {policy.intervals} intervals")
    recent = rates[-grown:]
    if min(recent) < policy.share * whole or recent[-1] < policy.slows * recent[0]:
        return Proof("suspected", whole, grown, "it grows more and more slowly, or unevenly")
    return Proof("proven", whole, grown)


def _whole_periods(sizes: Sequence[tuple[float, int]], period: float | None) -> list[tuple[float, int]]:
    """The censuses that are at least a period apart, counted back from the last."""
    kept: list[tuple[float, int]] = []
    for point in reversed(sizes):
        if not kept or kept[-1][0] - point[0] >= (period or 0):
            kept.append(point)
    return kept[::-1]


def _contradicts(found: GrowthEstimate, limit: float | None, rate: float, policy: ProofPolicy) -> bool:
    """Whether a counter that would have seen as much shows nothing like it."""
    enough = policy.contradicts * rate
    if found.state == "growing":
        return found.high < enough
    return found.state == "flat" and limit is not None and limit < enough
