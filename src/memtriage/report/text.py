"""Quantities in words: sizes, rates, durations, lists of ranks. What is unknown is `n/a`, never 0."""

from __future__ import annotations

from typing import Final

from memtriage.model import FindingKind
from memtriage.model.units import UNKNOWN, rank_list, size

__all__ = ["GROWING", "KINDS", "SEVERE", "UNKNOWN", "count", "duration", "rank_list", "rate", "size"]

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
GROWING: Final[frozenset[FindingKind]] = frozenset({"leak", "garbage_cycle"})
"""Kinds of findings whose growth says more than their bytes."""
SEVERE: Final[frozenset[FindingKind]] = GROWING | {"out_of_memory"}
"""Kinds of findings that end a run sooner or later."""

_MINUTE: Final = 60
_HOUR: Final = 60 * _MINUTE


def rate(amount: int | None, per: str) -> str:
    """Return growth in words.

    >>> rate(171966464, "step")
    '164.0 MiB per step'
    """
    return UNKNOWN if amount is None else f"{size(amount)} per {per}"


def duration(seconds: float | None) -> str:
    """Return a time span in at most two units.

    >>> duration(0.0123), duration(9.87), duration(200), duration(7500)
    ('12 ms', '9.9 s', '3 min 20 s', '2 h 05 min')
    """
    if seconds is None:
        return UNKNOWN
    if round(seconds * 1000) < 1000:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02d} s"
    minutes = round(seconds / _MINUTE)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "step"), count(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
