"""What of a device's memory stands or falls together: islands.

An island is a segment with something alive in it; of an expandable segment, a run of pages that live blocks
connect. When every live block of an island has gone elsewhere, all of it can go back to the driver: so its
free bytes are what moving them gains, and the live ones what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memtriage.allocator.settings import SMALL_SEGMENT
from memtriage.model.recording import Int64s
from memtriage.treat.device.layout import FREE, DeviceLayout, SegmentPlace


class Island(NamedTuple):
    """Bytes of one segment. Addresses and sizes in bytes.

    Attributes:
        place: the segment.
        start, end: the range.
        live: bytes of its blocks that are alive or await a stream.
        blocks: indices of those in the layout.
        around: the first and, exclusive, the last index of all blocks in the range, in whole or in part.
    """

    place: SegmentPlace
    start: int
    end: int
    live: int
    blocks: tuple[int, ...]
    around: tuple[int, int]

    @property
    def stranded(self) -> int:
        """Bytes that are free and cannot be given back."""
        return self.end - self.start - self.live


def holes_of(layout: DeviceLayout, islands: Sequence[Island], at_least: int = 0) -> tuple[Int64s, Int64s]:
    """Addresses and sizes of the free blocks, of some size, that are in islands, in whole or in part."""
    free = np.flatnonzero((layout.state == FREE) & (layout.size >= at_least))
    if not len(free):
        return layout.address[free], layout.size[free]
    spans = np.array([island.around for island in islands], np.int64).reshape(-1, 2)
    edges = np.zeros(len(layout.state) + 1, np.int64)
    np.add.at(edges, spans[:, 0], 1)
    np.add.at(edges, spans[:, 1], -1)
    free = free[np.cumsum(edges[:-1])[free] > 0]
    return layout.address[free], layout.size[free]


def islands_of(layout: DeviceLayout) -> list[Island]:
    """All islands with stranded bytes."""
    used = layout.state != FREE
    live = _sums(np.where(used, layout.size, 0), layout.first)
    index = np.flatnonzero(used)
    # Plain lists: segments are many and small, and an array operation costs more than a segment's blocks.
    in_use, upto = index.tolist(), np.searchsorted(index, layout.first).tolist()
    first = layout.first.tolist()
    islands: list[Island] = []
    for at, place in enumerate(layout.places):
        if not 0 < live[at] < place.size:
            continue
        around = first[at], first[at + 1]
        blocks = tuple(in_use[upto[at] : upto[at + 1]])
        if place.expandable:
            islands += _runs(layout, place, blocks, around)
        else:
            end = place.address + place.size
            islands.append(Island(place, place.address, end, live[at], blocks, around))
    return islands


def _sums(values: Int64s, first: Int64s) -> list[int]:
    """Of the values from each of some indices up to the next."""
    passed = np.concatenate([[0], np.cumsum(values)])
    sums: list[int] = (passed[first[1:]] - passed[first[:-1]]).tolist()
    return sums


def _runs(
    layout: DeviceLayout, place: SegmentPlace, blocks: tuple[int, ...], around: tuple[int, int]
) -> Iterator[Island]:
    """The islands of an expandable segment. Pages count from its first mapped byte, which begins one."""
    page = SMALL_SEGMENT if place.small else layout.settings.large_segment_size
    used = np.array(blocks)
    low = (layout.address[used] - place.address) // page
    high = -(-(layout.address[used] + layout.size[used] - place.address) // page)
    # A run ends where the next live block begins in a later page than the last one ended in.
    cuts = np.flatnonzero(low[1:] >= high[:-1]) + 1
    for run in np.split(np.arange(len(used)), cuts):
        first, last = int(run[0]), int(run[-1])
        start = place.address + int(low[first]) * page
        end = min(place.address + int(high[last]) * page, place.address + place.size)
        mine = blocks[first : last + 1]
        island = Island(
            place=place,
            start=start,
            end=end,
            live=int(layout.size[used[run]].sum()),
            blocks=mine,
            # With the free blocks on either side, which may reach into the run.
            around=(max(around[0], mine[0] - 1), min(around[1], mine[-1] + 2)),
        )
        if island.stranded:
            yield island
