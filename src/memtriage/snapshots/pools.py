"""Private pools in a recording: several of them, where the CUDA graphs could share one. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.account.segments import free_in
from memtriage.model.blocks import DEFAULT_POOL
from memtriage.model.findings import Finding
from memtriage.model.units import MIB, count, size
from memtriage.playbook.snapshots import ADVICE
from memtriage.snapshots.view import DeviceView, known_site

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Thresholds for reporting private pools.

    Attributes:
        pools: fewest private pools that are reported.
        floor_bytes: what all of them but the largest must have reserved.
    """

    pools: int = 2
    floor_bytes: int = 64 * MIB


POLICY: Final = PoolPolicy()


def pool_findings(view: DeviceView, policy: PoolPolicy = POLICY) -> list[Finding]:
    """Find private pools that are kept apart: none of them can use what another has free."""
    reserved: Counter[tuple[int, int]] = Counter()
    free: Counter[tuple[int, int]] = Counter()
    for segment in view.segments:
        if segment.pool != DEFAULT_POOL:
            reserved[segment.pool] += segment.size
            free[segment.pool] += free_in(segment)
    if len(reserved) < policy.pools:
        return []
    total, largest = reserved.total(), max(reserved.values())
    if total - largest < policy.floor_bytes:
        return []
    # a capture without `pool=` makes an id of the form (n, 0); handles and MemPools are (0, n)
    own = sum(pool[1] == 0 for pool in reserved)
    pools = ", ".join(
        f"pool {pool} {size(amount)} ({size(free[pool])} free)"
        for pool, amount in reserved.most_common(_SHOWN)
    )
    more = len(reserved) - _SHOWN
    advice = ADVICE["several private pools"]
    return [
        Finding(
            kind="private_pool",
            device=view.device,
            bytes=total,
            allocated_at=_site(view, set(reserved)),
            mechanism=advice.why,
            fix=advice.fix,
            playbook=advice.entry,
            evidence=[
                f"{size(total)} reserved in {count(len(reserved), 'private pool')}, of which "
                f"{size(free.total())} is free at the snapshot",
                f"by pool: {pools}" + (f", and {more} more" if more > 0 else ""),
                f"one shared pool saves at most {size(total - largest)}: all but the largest",
                *([f"{count(own, 'pool')} made by a capture without `pool=`"] if own else []),
                "a snapshot does not say which of the graphs are still alive",
            ],
        )
    ]


def _site(view: DeviceView, pools: set[tuple[int, int]]) -> str | None:
    """Return the site that allocated most in these pools."""
    inside = np.fromiter((pool in pools for pool in view.replayed.pool), np.bool_, len(view.replayed.pool))
    rows = [row for row in view.by_site(inside) if known_site(row[0])]
    return rows[0][0] if rows else None
