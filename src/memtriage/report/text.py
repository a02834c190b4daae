"""Quantities in words: sizes, rates, durations, lists of ranks. What is unknown is `n/a`, never 0."""

from __future__ import annotations

from typing import Final

from memtriage.model.findings import FindingKind
from memtriage.model.units import (
    UNKNOWN,
    count,
    devices_in_words,
    duration,
    is_process,
    processes_in_words,
    rank_list,
    ranks_in_words,
    rate,
    size,
    work_of,
)

__all__ = [
    "KINDS",
    "UNKNOWN",
    "count",
    "devices_in_words",
    "duration",
    "is_process",
    "processes_in_words",
    "rank_list",
    "ranks_in_words",
    "rate",
    "size",
    "work_of",
]

KINDS: Final[dict[FindingKind, str]] = {
    "leak": "leak",
    "garbage_cycle": "garbage cycle",
    "residue": "residue",
    "fragmentation": "fragmentation",
    "private_pool": "private pool",
    "stream_pool": "stream pool",
    "out_of_memory": "out of memory",
    "pinned_rounding": "pinned-memory rounding",
    "malloc_retention": "memory kept by malloc",
    "worker_copy_on_write": "workers un-share memory",
    "shared_memory": "shared memory",
    "host_limit": "host memory at its limit",
    "rank_differs": "rank differs",
}
"""Kinds of findings in words."""
