"""Bytes of a recording by owner and by allocation site, at one instant and over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtriage.allocator.replay import ReplayedTrace
from memtriage.model.recording import OWNERS, Bytes8, Int64s, OwnedBytes, Stack


@dataclass(frozen=True, slots=True)
class SiteIndex:
    """The allocation sites of a recording, and the site of every life.

    Attributes:
        names: the distinct sites.
        of_life: index into `names` for each life.
    """

    names: tuple[str, ...]
    of_life: NDArray[np.int64]


def index_sites(replayed: ReplayedTrace, stacks: Sequence[Stack]) -> SiteIndex:
    """Number the sites. Stacks that end in the same line of the same function are one site."""
    numbers: dict[str, int] = {}
    of_stack = np.array([numbers.setdefault(stack.site, len(numbers)) for stack in stacks], np.int64)
    return SiteIndex(tuple(numbers), of_stack[replayed.stack])


def alive_at(replayed: ReplayedTrace, event: int) -> NDArray[np.bool_]:
    """Which lives are allocated after an event; -1 means before the first one."""
    ended = (replayed.died >= 0) & (replayed.died <= event)
    return (replayed.born <= event) & ~ended


def owned_bytes(
    alive: NDArray[np.bool_], size: Int64s, owners: Bytes8, sites: SiteIndex
) -> tuple[OwnedBytes, ...]:
    """The bytes of the marked lives by owner and site, biggest first."""
    keys = owners[alive].astype(np.int64) * len(sites.names) + sites.of_life[alive]
    distinct, where, counts = np.unique(keys, return_inverse=True, return_counts=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, where.reshape(-1), size[alive])
    rows = [
        OwnedBytes(OWNERS[key // len(sites.names)], sites.names[key % len(sites.names)], total, count)
        for key, total, count in zip(distinct.tolist(), totals.tolist(), counts.tolist(), strict=True)
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.owner, row.site)))


@dataclass(frozen=True, slots=True)
class SiteSeries:
    """What each site has alive at the ends of steps: rows are sites, columns are the steps looked at.

    Attributes:
        steps: number of each step looked at, counted from 1.
        bytes, blocks: alive at its end.
    """

    steps: NDArray[np.int64]
    bytes: NDArray[np.int64]
    blocks: NDArray[np.int64]


def site_series(replayed: ReplayedTrace, sites: SiteIndex, ends: Sequence[int], most: int) -> SiteSeries:
    """Follow the sites over the steps.

    Args:
        replayed: the lives.
        sites: their sites.
        ends: index of the first event after each step.
        most: steps to look at, evenly spread, the last one included.
    """
    spread = np.unique(np.linspace(len(ends) - 1, 0, min(most, len(ends))).round().astype(np.int64))
    marks = np.asarray(ends, np.int64)[spread]
    first = np.searchsorted(marks, replayed.born, "right")
    end = np.where(replayed.died < 0, len(marks), np.searchsorted(marks, replayed.died, "right"))
    seen = first < end
    shape = (len(sites.names), len(marks) + 1)
    totals, blocks = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    site, size = sites.of_life[seen], replayed.size[seen]
    np.add.at(totals, (site, first[seen]), size)
    np.subtract.at(totals, (site, end[seen]), size)
    np.add.at(blocks, (site, first[seen]), 1)
    np.subtract.at(blocks, (site, end[seen]), 1)
    return SiteSeries(
        steps=spread + 1,
        bytes=np.cumsum(totals, axis=1)[:, :-1],
        blocks=np.cumsum(blocks, axis=1)[:, :-1],
    )
