"""Islands: parts of a device's memory that can only be returned as a whole.

An island is a segment with live blocks; in an expandable segment, a run of pages that live blocks connect.
When every live block of an island has moved elsewhere, the whole island can return to the driver: its free
bytes are the gain, and its live bytes the cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memtriage.allocator.settings import SMALL_SEGMENT
from memtriage.model.recording import Int64s
from memtriage.treat.device.protocol import FREE, DeviceLayout, SegmentPlace


class Island(NamedTuple):
    """Bytes of one segment. Addresses and sizes in bytes.

    Attributes:
        place: the segment.
        start, end: the range.
        live: bytes of its blocks that are alive or await a stream.
        blocks: indices of these blocks in the layout.
        around: the first and, exclusive, the last index of all blocks that are wholly or partly in the range.
    """

    place: SegmentPlace
    start: int
    end: int
    live: int
    blocks: tuple[int, ...]
    around: tuple[int, int]

    @property
    def stranded(self) -> int:
        """Free bytes that cannot be returned."""
        return self.end - self.start - self.live


def holes_of(layout: DeviceLayout, islands: Sequence[Island], at_least: int = 0) -> tuple[Int64s, Int64s]:
    """Addresses and sizes of the free blocks of at least some size that are wholly or partly in islands."""
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
    # Plain lists: segments are many and small, and an array operation takes longer than a segment's blocks.
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
    """Sums of the values from each of some indices up to the next."""
    passed = np.concatenate([[0], np.cumsum(values)])
    sums: list[int] = (passed[first[1:]] - passed[first[:-1]]).tolist()
    return sums


def _runs(
    layout: DeviceLayout, place: SegmentPlace, blocks: tuple[int, ...], around: tuple[int, int]
) -> Iterator[Island]:
    """The islands of an expandable segment. Its first mapped byte begins a page."""
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
