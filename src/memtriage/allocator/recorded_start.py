"""The segments at the beginning of a recorded trace: those at its end with every event undone.

This also works for a trace that starts late, or whose ring buffer dropped its oldest entries. A block existed
at the beginning if it is alive at the end, or freed in the trace, but never allocated in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from memtriage.allocator.settings import SMALL_LIMIT, SMALL_SEGMENT, AllocatorSettings
from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.recording import (
    ALLOC,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Events,
)
from memtriage.observe.cuda import LARGE_PAGE, SMALL_PAGE


@dataclass(slots=True)
class Region:
    """A segment, or the virtual range of an expandable one.

    Attributes:
        address, size: the range, in bytes; of an expandable one all that was ever mapped.
        stream, pool: whom it serves.
        page: size of its pages; 0 for a segment that is not expandable.
    """

    address: int
    size: int
    stream: int
    pool: tuple[int, int]
    page: int

    @property
    def keeps(self) -> int:
        """How large a rest a block keeps for itself, if it may be split at all (`should_split`)."""
        return 0 if self.page or self.size <= SMALL_SEGMENT else SMALL_LIMIT

    @property
    def end(self) -> int:
        """The first address after the region."""
        return self.address + self.size


@dataclass(frozen=True, slots=True)
class OldBlock:
    """A block older than the first event."""

    address: int
    size: int
    requested: int
    stream: int
    guessed: bool
    """Nothing in the trace tells whether the allocator gave it up to 1 MiB more, or it was freed already and
    awaits a stream."""


@dataclass(slots=True)
class StartingState:
    """The state before the first event.

    Attributes:
        regions: the segments of that moment, and all virtual ranges.
        mapped: what was mapped of the virtual ranges.
        blocks: the blocks in use, in order of address.
        occupied: blocks that wait for a stream all through the trace.
        pools: pool of the segment that the segment_alloc event with this index makes.
        undone: index of the first event from which on every segment is known; 0 when all add up.
    """

    regions: list[Region]
    mapped: Ranges
    blocks: list[OldBlock] = field(default_factory=list)
    occupied: list[tuple[int, int]] = field(default_factory=list)
    pools: dict[int, tuple[int, int]] = field(default_factory=dict)
    undone: int = 0


class Ranges:
    """A set of addresses as ranges that do not touch, in order."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Take in [start, end), joining what it touches."""
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """Leave out [start, end)."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return
        left, right = self._starts[first], self._ends[last - 1]
        self._starts[first:last] = ([left] if left < start else []) + ([end] if end < right else [])
        self._ends[first:last] = ([start] if left < start else []) + ([right] if end < right else [])

    def within(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges that begin in [start, end)."""
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        return list(zip(self._starts[first:last], self._ends[first:last], strict=True))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)


def starting_state(trace: Events, segments: Sequence[Segment], settings: AllocatorSettings) -> StartingState:
    """Undo a trace.

    Args:
        trace: the events of one device.
        segments: its segments after the last of them.
        settings: the allocator's, as recorded.
    """
    start = _undo_segments(trace, segments)
    start.blocks, start.occupied = _old_blocks(trace, segments, start, settings)
    return start


def _undo_segments(trace: Events, segments: Sequence[Segment]) -> StartingState:
    ordinary = {segment.address: segment for segment in segments if segment.page is None}
    present = {
        address: Region(address, one.size, one.stream, one.pool, page=0) for address, one in ordinary.items()
    }
    mapped = Ranges((segment.address, segment.end) for segment in segments if segment.page is not None)
    start = StartingState(regions=[], mapped=mapped)
    events = np.flatnonzero((trace.kind >= SEGMENT_ALLOC) & (trace.kind <= SEGMENT_UNMAP))[::-1].tolist()
    for index in events:
        kind, address, size = int(trace.kind[index]), int(trace.address[index]), int(trace.size[index])
        if kind == SEGMENT_ALLOC:
            region = present.pop(address, None)
            if region is None:
                start.undone = start.undone or index + 1
            else:
                start.pools[index] = region.pool
        elif kind == SEGMENT_FREE:
            present[address] = Region(address, size, int(trace.stream[index]), DEFAULT_POOL, page=0)
        elif kind == SEGMENT_MAP:
            mapped.remove(address, address + size)
        else:
            mapped.add(address, address + size)
    start.regions = [present[address] for address in sorted(present)] + _virtual_ranges(trace, segments)
    return start


def _virtual_ranges(trace: Events, segments: Sequence[Segment]) -> list[Region]:
    """Everything that was ever mapped, joined where it touches, with the page that its segments tell."""
    mapping = (trace.kind == SEGMENT_MAP) | (trace.kind == SEGMENT_UNMAP)
    addresses, sizes, streams = trace.address[mapping], trace.size[mapping], trace.stream[mapping]
    expandable = [segment for segment in segments if segment.page is not None]
    ranges = Ranges(zip(addresses.tolist(), (addresses + sizes).tolist(), strict=True))
    for segment in expandable:
        ranges.add(segment.address, segment.end)
    regions: list[Region] = []
    for first, end in ranges:
        inside = [segment for segment in expandable if first <= segment.address < end]
        if inside:
            page, stream, pool = inside[0].page or LARGE_PAGE, inside[0].stream, inside[0].pool
        else:
            here = (addresses >= first) & (addresses < end)
            small = bool((sizes[here] < LARGE_PAGE).any())
            page, stream, pool = SMALL_PAGE if small else LARGE_PAGE, int(streams[here][0]), DEFAULT_POOL
        regions.append(Region(first, end - first, stream, pool, page=page))
    return regions


def _old_blocks(
    trace: Events, segments: Sequence[Segment], start: StartingState, settings: AllocatorSettings
) -> tuple[list[OldBlock], list[tuple[int, int]]]:
    indices = np.flatnonzero(trace.kind <= FREE_COMPLETED)
    addresses, first = np.unique(trace.address[indices], return_index=True)
    opening = indices[first]
    met = set(addresses.tolist())
    blocks: list[OldBlock] = []
    occupied: list[tuple[int, int]] = []
    for segment in segments:
        for block in segment.blocks:
            if block.state == "free" or block.address in met:
                continue
            if block.state == "awaiting":
                occupied.append((block.address, block.size))
                continue
            old = OldBlock(block.address, block.size, block.requested, segment.stream, False)
            blocks.append(old)
    freed = opening[trace.kind[opening] != ALLOC]
    taken = [*((block.address, block.size) for block in blocks), *occupied]
    blocks += _freed_blocks(trace, freed.tolist(), taken, start, settings)
    return sorted(blocks, key=lambda block: block.address), occupied


def _freed_blocks(
    trace: Events,
    events: Sequence[int],
    others: Sequence[tuple[int, int]],
    start: StartingState,
    settings: AllocatorSettings,
) -> list[OldBlock]:
    """Blocks that the trace frees without having allocated; their size follows from what lies around them.

    In the large pool no free block is as small as 1 MiB: a gap up to that size is the block's own slack.
    """
    edges = sorted({address for address, _ in others} | {int(trace.address[index]) for index in events})
    regions = sorted(start.regions, key=lambda region: region.address)
    bases = [region.address for region in regions]
    blocks = []
    for index in events:
        address, requested = int(trace.address[index]), int(trace.size[index])
        size, guessed = settings.round_size(requested), bool(trace.kind[index] == FREE_COMPLETED)
        position = bisect_right(bases, address) - 1
        if position >= 0 and address < regions[position].end and regions[position].keeps:
            region = regions[position]
            behind = bisect_right(edges, address)
            limit = min(edges[behind] if behind < len(edges) else region.end, region.end)
            gap = limit - address - size
            unsplit = settings.max_split_size is not None and size >= settings.max_split_size
            if gap > 0 and (unsplit or gap <= region.keeps):
                size += gap
            else:
                guessed = guessed or gap > 0
        blocks.append(OldBlock(address, size, requested, int(trace.stream[index]), guessed))
    return blocks
