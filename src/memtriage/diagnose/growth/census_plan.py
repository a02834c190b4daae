"""Decide when the next census is due, and whether it is affordable. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from memtriage.diagnose.growth.trend import GrowthEstimate
from memtriage.model.position import Scale


@dataclass(frozen=True, slots=True)
class CensusPolicy:
    """Distances between censuses, in positions (steps, micro-batches, seconds).

    Attributes:
        first: positions until the first: what training needs from the start exists by then.
        unasked: the same while nothing is suspected. By so many seconds most programs have loaded their data
            and begun to train, and steps are followed instead.
        gap: shortest distance.
        widens: while nothing is open (nothing grows, or what grows is proven and its counter shows it) each
            census is at so many times the position of the one before: five censuses in a run of 1,000 steps,
            nine in one of 300,000.
        share: under suspicion, the longest distance is this part of the time since growth began, so that
            three intervals fit into as long a time again.
        free_s: seconds of the processor that all censuses together may take in any run. A machine that is
            busy with other work makes all of a program slower, and is no reason to look less often.
        cost: part of the time that they may take beyond that.
        leak_free_s, leak_cost: the same where something surely grows, which is worth more.
        always: censuses that are taken at any cost: what no counter sees shows from the second on.
        to_prove: the same since a suspicion began: three intervals take four censuses, and two more show that
            growth continues, or prove what began in the middle of an interval.
        goes_on: the distance between censuses of a proven leak that no counter shows is this part of the time
            over which it was seen to grow: less than `ProofPolicy.ages`.
    """

    first: float
    unasked: float
    gap: float
    widens: float = 4.0
    share: float = 1 / 3
    free_s: float = 1.0
    cost: float = 0.02
    leak_free_s: float = 2.5
    leak_cost: float = 0.05
    always: int = 2
    to_prove: int = 6
    goes_on: float = 0.2


PLANS: Final[Mapping[Scale, CensusPolicy]] = {
    "step": CensusPolicy(first=3, unasked=3, gap=2),
    # Where the first step comes after fewer backwards, steps are followed.
    "microbatch": CensusPolicy(first=8, unasked=8, gap=2),
    # Loading and building a model grow, too, and no census of that is of use.
    "second": CensusPolicy(first=0.25, unasked=5.0, gap=0.15, always=1, to_prove=5),
}


def next_census(
    taken: Sequence[float],
    growth: GrowthEstimate,
    proven: bool,
    policy: CensusPolicy = PLANS["step"],
    begun: float = 0.0,
    *,
    shown: bool = True,
) -> float:
    """Return the position from which on the next census is due; it may be in the past.

    While nothing grows, distances grow with the run, so that a holder that no counter sees is still compared
    over several intervals. Under suspicion the first follows soon, and each distance doubles; a census that
    names nothing does not put off the next by more than that. What is periodic is compared whole periods
    apart. Once a leak is proven, its counter shows whether it continues, and distances grow with the run
    again.

    Args:
        taken: positions of the censuses so far, oldest first.
        growth: the most suspicious growth that the counters show.
        proven: all growth that they show is proven and explained.
        policy: the scale's distances.
        begun: position at which the program's own work begins; over time, its imports come first.
        shown: whether the counters show what is proven. What no counter shows is looked at more often.
    """
    suspected = growth.state in ("growing", "undecided")
    if len(taken) < 2:
        return begun + (1 + len(taken)) * (policy.first if suspected else policy.unasked)
    last = taken[-1]
    if not suspected or (proven and shown):
        return last + max(policy.gap, (policy.widens - 1) * (last - begun))
    onset = growth.onset if growth.onset is not None else taken[0]
    if proven:
        return last + max(policy.gap, policy.goes_on * (last - onset))
    since = sum(position >= onset for position in taken)
    doubled = policy.gap * 2.0 ** max(0, since - 1)
    distance = max(policy.gap, min(doubled, policy.share * max(0.0, last - onset)))
    if growth.period is not None:
        distance = max(1.0, round(distance / growth.period)) * growth.period
    return last + distance


def affordable(
    taken: Sequence[float],
    suspected: float | None,
    spent_s: float,
    elapsed_s: float,
    policy: CensusPolicy = PLANS["step"],
    *,
    grows: bool = False,
) -> bool:
    """Whether one more census fits what censuses may cost.

    Args:
        taken: positions of the censuses so far.
        suspected: since when something is suspected to grow, or is proven and shown by no counter; None where
            nothing is, or its counter shows whether it goes on.
        spent_s: seconds of the processor that they took together.
        elapsed_s: seconds since the watch began.
        policy: what they may cost.
        grows: a leak is proven, or a counter surely grows.
    """
    if len(taken) < policy.always:
        return True
    if suspected is not None and sum(position >= suspected for position in taken) < policy.to_prove:
        return True
    free, cost = (policy.leak_free_s, policy.leak_cost) if grows else (policy.free_s, policy.cost)
    return spent_s * (1 + 1 / len(taken)) <= free + cost * elapsed_s
