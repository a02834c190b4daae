"""Medians with intervals that say how sure they are, from few measurements, assuming no distribution."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import Final

from msgspec.structs import replace

from memtriage.model.trials import Spread

CONFIDENCE: Final = 0.95
LEAST_TRIALS: Final = 3
"""Fewer trials than these say next to nothing of the median (two enclose it in half of all cases): then the
interval is over their steps."""


def median_interval(values: Sequence[float]) -> Spread | None:
    """Return the narrowest pair of values, equally far from both ends, that encloses the median so surely.

    A median lies outside the k-th lowest and the k-th highest of n independent values with the probability
    2 P(B < k), B binomial (n, 1/2), whatever the distribution (order statistics). Where even the lowest and
    the highest enclose it less surely than asked, they are returned with the confidence that they have:
    50 % for 2 values, 75 % for 3, 88 % for 4, 94 % for 5, 97 % for 6.

    Returns:
        None for fewer than two values.
    """
    ordered = sorted(values)
    count = len(ordered)
    if count < 2:
        return None
    outside, rank = 0.0, 0
    for place in range(count // 2):
        more = outside + 2 * comb(count, place) / 2**count
        if place > 0 and 1 - more < CONFIDENCE:
            break
        outside, rank = more, place
    return Spread(low=ordered[rank], high=ordered[count - 1 - rank], confidence=1 - outside, basis="trials")


def paired(rounds: Sequence[Sequence[float]]) -> tuple[float, Spread | None] | None:
    """Return the median of quantities that compare two variants, and the interval of that median.

    Each round counts as one, by the median of its quantities: steps of one process are no independent
    witnesses of another process. With fewer than `LEAST_TRIALS` rounds all quantities count, each as one.

    Args:
        rounds: of each round the quantities, e.g. one ratio a step.

    Returns:
        None without any.
    """
    known = [list(quantities) for quantities in rounds if quantities]
    if not known:
        return None
    if len(known) >= LEAST_TRIALS:
        medians = [median(quantities) for quantities in known]
        return median(medians), median_interval(medians)
    pooled = [quantity for quantities in known for quantity in quantities]
    interval = median_interval(pooled)
    if interval is not None and len(pooled) > len(known):
        interval = replace(interval, basis="steps")
    return median(pooled), interval


def ratio(
    own: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> tuple[float, Spread | None] | None:
    """Return how many times the other's measurements the own are, with the interval of that; see `paired`.

    Measurements of the same number in the same round make a pair: they were taken close in time, and a job
    that is seeded does the same work in them.

    Args:
        own, other: the measurements of each trial, round by round, of the same rounds.

    Returns:
        None without a pair, or where the other's are not all above 0.
    """
    pairs = [list(zip(mine, theirs, strict=False)) for mine, theirs in zip(own, other, strict=True)]
    if any(theirs <= 0 for pair in pairs for _, theirs in pair):
        return None
    return paired([[mine / theirs for mine, theirs in pair] for pair in pairs])
