"""What of a device's memory stands or falls together: islands.

An island is a segment with something alive in it; of an expandable segment, a run of pages that live blocks
connect. When every live block of an island has gone elsewhere, all of it can go back to the driver: so its
free bytes are what moving them gains, and the live ones what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memtriage.allocator.settings import SMALL_SEGMENT
from memtriage.treat.device.layout import FREE, Layout, Place


@dataclass(frozen=True, slots=True)
class Island:
    """Bytes of one segment. Addresses and sizes in bytes.

    Attributes:
        place: the segment.
        start, end: the range.
        live: bytes of its blocks that are alive or await a stream.
        blocks: indices of those in the layout.
        around: the first and, exclusive, the last index of all blocks in the range, in whole or in part.
    """

    place: Place
    start: int
    end: int
    live: int
    blocks: tuple[int, ...]
    around: tuple[int, int]

    @property
    def stranded(self) -> int:
        """Bytes that are free and cannot be given back."""
        return self.end - self.start - self.live

    def holes(self, layout: Layout) -> list[tuple[int, int]]:
        """(address, size) of the free blocks in the range, in whole or in part."""
        span = slice(*self.around)
        free = layout.state[span] == FREE
        return list(zip(layout.address[span][free].tolist(), layout.size[span][free].tolist(), strict=True))


def islands_of(layout: Layout) -> list[Island]:
    """All islands with stranded bytes."""
    used = layout.state != FREE
    up_to = np.concatenate([[0], np.cumsum(np.where(used, layout.size, 0))])
    live = (up_to[layout.first[1:]] - up_to[layout.first[:-1]]).tolist()
    found: list[Island] = []
    # Plain lists: segments are many and small, and an array operation costs more than a segment's blocks.
    first, in_use = layout.first.tolist(), used.tolist()
    for index, place in enumerate(layout.places):
        if not 0 < live[index] < place.size:
            continue
        around = first[index], first[index + 1]
        blocks = tuple(block for block in range(*around) if in_use[block])
        if place.expandable:
            found += _runs(layout, place, blocks, around)
        else:
            found.append(
                Island(place, place.address, place.address + place.size, live[index], blocks, around)
            )
    return found


def _runs(layout: Layout, place: Place, blocks: tuple[int, ...], around: tuple[int, int]) -> Iterator[Island]:
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
