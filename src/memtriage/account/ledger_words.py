"""Rows of a ledger and the words of their details."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from memtriage.account.claims import OwnedPart
from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.ledger import LedgerRow
from memtriage.model.units import size as in_words

NAMED_PARTS: Final = 3
"""How many of the biggest parts of a row its detail names."""


def row_of(name: str, size: int, *details: str | None) -> LedgerRow:
    """Make a row without an owner, with the details that are not None."""
    return LedgerRow(row=name, bytes=size, detail=join(*details))


def join(*parts: str | None) -> str | None:
    """Join the parts that are not empty; None if there are none."""
    return "; ".join(part for part in parts if part) or None


def pools_of(parts: Iterable[OwnedPart]) -> str | None:
    """Name the private pools that contain parts, by their bytes."""
    sums: Counter[str] = Counter()
    for part in parts:
        if part.pool != DEFAULT_POOL:
            sums[f"{part.pool[0]}.{part.pool[1]}"] += part.size
    return f"private pools: {biggest(sums.items())}" if sums else None


def pool_list(segments: Iterable[Segment]) -> str | None:
    """Name the private pools that segments belong to, by reserved bytes."""
    sums: Counter[str] = Counter()
    for segment in segments:
        sums[f"{segment.pool[0]}.{segment.pool[1]}"] += segment.size
    return f"private pools by reserved bytes: {biggest(sums.items())}" if sums else None


def biggest(parts: Iterable[tuple[str, int]]) -> str | None:
    """Name the biggest parts with their sizes, equal names joined, and say how many more there are."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, size in parts:
        sums[name] += size
        counts[name] += 1
    named = sorted(sums.items(), key=lambda part: (-part[1], part[0]))
    words = [
        f"{name} {in_words(size)}" + (f" in {counts[name]}" if counts[name] > 1 else "")
        for name, size in named[:NAMED_PARTS]
    ]
    if len(named) > NAMED_PARTS:
        words.append(
            f"{len(named) - NAMED_PARTS} more {in_words(sum(size for _, size in named[NAMED_PARTS:]))}"
        )
    return ", ".join(words) or None


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, in the singular or the plural."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
