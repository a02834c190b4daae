"""The working parts of the simulator: blocks, segments, arenas and pools. Mutable, and made for speed.

A block is in a segment, linked to its neighbors. Free blocks are in their arena (one per pool, size class and
stream) in the order in which best fit tries them: by size, then by position. One integer holds both, so the
search is a bisection of a plain list.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from memtriage.allocator.settings import MIN_BLOCK, SMALL_LIMIT, SMALL_SEGMENT, AllocatorSettings

ALLOCATED: Final = 0
FREE: Final = 1
AWAITING: Final = 2
"""Freed, but a stream that used the block has not passed that point."""
UNMAPPED: Final = 3
"""Virtual addresses of an expandable segment without memory behind them."""
GONE: Final = 4
"""Merged into a neighbor, or its segment was given back."""

SIZE_SHIFT: Final = 80
"""Bits for the position in a block's key: more than any address or `CREATION_SHIFT`ed counter needs."""
CREATION_SHIFT: Final = 48
"""Bits for the offset in a segment where segments are ordered by age; no virtual range is that big."""

NEVER: Final = sys.maxsize


@dataclass(slots=True, eq=False, repr=False)
class SimSegment:
    """A segment, or the virtual range of an expandable one.

    Attributes:
        address, size: the range in bytes; of an expandable one with what is not mapped.
        rank: position of its first byte in the order of blocks of equal size: its address, or its age.
        page: bytes mapped and unmapped at once; None where the segment is not expandable.
        head: the block with the lowest address.
    """

    arena: Arena
    address: int
    size: int
    rank: int
    page: int | None
    head: SimBlock = field(init=False)

    def __post_init__(self) -> None:
        self.head = SimBlock(self.arena, self, self.rank, self.size)

    def __iter__(self) -> Iterator[SimBlock]:
        """Its blocks in order of address."""
        block: SimBlock | None = self.head
        while block is not None:
            yield block
            block = block.next


@dataclass(slots=True, eq=False, repr=False)
class SimBlock:
    """A part of a segment; what `Simulator.malloc` returns.

    Attributes:
        where: position in the order of blocks: `segment.rank` plus the offset in the segment.
        size: bytes; with rounding and slack.
        requested: bytes asked for.
        state: `ALLOCATED`, `FREE`, `AWAITING`, `UNMAPPED` or `GONE`.
        key: under which a free block is in its arena.
        born: `SimPool.searches` when a block was freed; kept only while garbage collection is on, which looks
            at nothing but whole segments.
        streams: other streams that use the block (`record_stream`); None for none.
        events: streams it still waits for.
    """

    arena: Arena
    segment: SimSegment
    where: int
    size: int
    requested: int = 0
    state: int = ALLOCATED
    streams: set[int] | None = None
    prev: SimBlock | None = None
    next: SimBlock | None = None
    key: int = field(init=False)
    born: int = field(init=False)
    events: int = field(init=False)

    @property
    def address(self) -> int:
        """First byte."""
        segment = self.segment
        return self.where - segment.rank + segment.address

    @property
    def alone(self) -> bool:
        """True if the block is its whole segment."""
        return self.prev is None and self.next is None


@dataclass(slots=True, eq=False)
class SimPool:
    """The default pool, or a private one.

    Attributes:
        id: as in a snapshot.
        capturing: puts off events and flushes, as a graph capture does.
        released: nobody uses it any more: its free segments may be given back.
        searches: times a free large block was sought while garbage collection was on: the clock by which it
            tells old blocks.
        small, large: the arenas of each size class, by stream.
    """

    id: tuple[int, int]
    capturing: bool
    released: bool = False
    searches: int = 0
    small: dict[int, Arena] = field(default_factory=dict)
    large: dict[int, Arena] = field(default_factory=dict)


class Arena:
    """Free blocks of one pool, size class and stream.

    Attributes:
        keys, blocks: free blocks in the order of best fit, and their keys.
        unmapped: unmapped ranges of its expandable segments, by address.
        expandable: new segments are expandable.
        least_rest: a block is split if at least this much of it would be left.
        split_limit: requests of this size or more are not split.
        page: bytes mapped at once in an expandable segment.
    """

    def __init__(self, pool: SimPool, stream: int, *, small: bool, settings: AllocatorSettings) -> None:
        self.pool = pool
        self.stream = stream
        self.small = small
        self.page = SMALL_SEGMENT if small else settings.large_segment_size
        self.keys: list[int] = []
        self.blocks: list[SimBlock] = []
        self.unmapped: list[SimBlock] = []
        self.expandable = settings.expandable_segments
        fine = small or self.expandable
        self.least_rest = MIN_BLOCK if fine else SMALL_LIMIT + 1
        self.split_limit = NEVER if fine or settings.max_split_size is None else settings.max_split_size

    def insert(self, block: SimBlock) -> None:
        """Make a block free."""
        block.state = FREE
        block.born = self.pool.searches
        block.key = key = (block.size << SIZE_SHIFT) + block.where
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.blocks.insert(at, block)

    def remove(self, block: SimBlock) -> None:
        """Take a free block out; its state is the caller's to set."""
        at = bisect_left(self.keys, block.key)
        del self.keys[at]
        del self.blocks[at]

    def insert_unmapped(self, block: SimBlock) -> None:
        """Make a block an unmapped range."""
        block.state = UNMAPPED
        insort(self.unmapped, block, key=attrgetter("address"))

    def absorb(self, block: SimBlock, other: SimBlock | None) -> None:
        """Merge a neighbor into a block that is in no list, if both are free or both are unmapped."""
        if other is None or other.state != block.state:
            return
        if other.state == FREE:
            self.remove(other)
        else:
            self.unmapped.remove(other)
        if other is block.prev:
            block.where = other.where
            block.prev = other.prev
            if other.prev is None:
                block.segment.head = block
            else:
                other.prev.next = block
        else:
            block.next = other.next
            if other.next is not None:
                other.next.prev = block
        block.size += other.size
        other.state = GONE


def split_front(block: SimBlock, size: int) -> SimBlock:
    """Cut the first `size` bytes off a block that is in no list; returns the new block in front."""
    front = SimBlock(block.arena, block.segment, block.where, size)
    before = block.prev
    front.prev = before
    front.next = block
    if before is None:
        block.segment.head = front
    else:
        before.next = front
    block.prev = front
    block.where += size
    block.size -= size
    return front


def expandable_size(block: SimBlock) -> int:
    """What best fit takes for the size of a free block: with the unmapped space behind it."""
    behind = block.next
    return block.size + (behind.size if behind is not None and behind.state == UNMAPPED else 0)


def whole_pages(block: SimBlock) -> tuple[int, int]:
    """Address and size of the whole pages inside a block of an expandable segment; size 0 for none."""
    segment = block.segment
    page = segment.page
    assert page is not None
    start = block.where - segment.rank
    first = -(-start // page) * page
    last = (start + block.size) // page * page
    return segment.address + first, max(last - first, 0)
