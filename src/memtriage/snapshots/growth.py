"""Find the allocation sites of a recording that grow from step to step, and how fast. Pure.

A recording knows every block, so it needs fewer steps than a counter does: the floor must rise from each
third of the steps to the next, and go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from memtriage.diagnose.growth.estimate import FEWEST, floor_rise
from memtriage.diagnose.growth.evidence import WARM_UP
from memtriage.snapshots.sites import SiteSeries

MOST_STEPS: Final = 240
"""Steps looked at in a long recording, evenly spread."""


@dataclass(frozen=True, slots=True)
class RecordedGrowthPolicy:
    """Thresholds for growth of allocation sites.

    Attributes:
        few: fewest steps by which growth is judged at all.
        many: from this many steps on floors are compared; with fewer, bytes and blocks must rise at every
            step but the first.
        floor_bytes: growth a step, all sites together, below which nothing is said.
        goes_on: part of the rate that the last third of the steps must still show: a cache that filled up and
            an optimizer's late state have stopped.
    """

    few: int = 4
    many: int = WARM_UP + FEWEST
    floor_bytes: int = 1024
    goes_on: float = 0.3


RECORDED_POLICY: Final = RecordedGrowthPolicy()


@dataclass(frozen=True, slots=True)
class SiteGrowth:
    """A site that grows: bytes per step, as an exact ratio of what was seen."""

    site: int
    rate: float


def growing_sites(series: SiteSeries, policy: RecordedGrowthPolicy = RECORDED_POLICY) -> list[SiteGrowth]:
    """Return the sites that grow, fastest first."""
    steps = series.steps.tolist()
    if len(steps) < policy.few:
        return []
    candidates = (series.bytes[:, -1] > series.bytes[:, 0]).nonzero()[0].tolist()
    growths = []
    for site in candidates:
        values, blocks = series.bytes[site].tolist(), series.blocks[site].tolist()
        rate = _rate(steps, values, blocks, policy)
        if rate is not None:
            growths.append(SiteGrowth(site, rate))
    return sorted(growths, key=lambda growth: (-growth.rate, growth.site))


def _rate(
    steps: Sequence[int], values: Sequence[int], blocks: Sequence[int], policy: RecordedGrowthPolicy
) -> float | None:
    if len(steps) >= policy.many:
        third = len(steps) // 3
        rises = all(after >= before for before, after in pairwise(values[WARM_UP:]))
        if not rises and blocks[-1] <= blocks[WARM_UP]:
            # as many blocks as before, now larger and now smaller: a batch, an output
            return None
        rate = floor_rise(list(zip(steps, values, strict=True))[WARM_UP:])
        if not rate or values[-1] - values[-third] < policy.goes_on * rate * (steps[-1] - steps[-third]):
            return None
        # where nothing falls back, the floors are not needed to see through it
        return (values[-1] - values[WARM_UP]) / (steps[-1] - steps[WARM_UP]) if rises else rate
    later, counts = values[1:], blocks[1:]
    if all(after > before for before, after in [*pairwise(later), *pairwise(counts)]):
        return (later[-1] - later[0]) / (steps[-1] - steps[1])
    return None
