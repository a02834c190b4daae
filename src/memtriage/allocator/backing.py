"""The segments of the arenas: what is requested from the driver, and what is returned to it and when.

Expandable segments are virtual ranges whose pages get memory when it is needed and lose it under pressure.
The rules are those of `try_allocate_expandable_block`, `map_block` and `unmap_block` in
CUDACachingAllocator.cpp: memory is mapped at the lowest address where enough free or unmapped space follows,
in whole pages (2 MiB in the small pool, the large segment size in the large one); whole free pages are
unmapped when the cache is flushed.

Sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from memtriage.allocator.blocks import (
    CREATION_SHIFT,
    FREE,
    GONE,
    SIZE_SHIFT,
    UNMAPPED,
    Arena,
    SimBlock,
    SimSegment,
    split_front,
    whole_pages,
)
from memtriage.allocator.driver import Driver
from memtriage.allocator.events import AllocatorEvent, Hook
from memtriage.allocator.settings import ORDER_BY_CREATION, AllocatorSettings
from memtriage.model.recording import Action

UNKNOWN_DEVICE: Final = 1 << 40
"""Memory assumed for the size of virtual ranges where the device's is not given: more than any has."""
RANGE_NUMERATOR: Final = 9
RANGE_DENOMINATOR: Final = 8
"""A virtual range is 9/8 of the device's memory, in whole pages."""


class Backing:
    """The segments of one device.

    Args:
        settings: the configuration.
        driver: gives and takes memory.
        device_memory: the device's memory; None if it does not matter.
        limit: what the process may reserve; None for what the settings say.
        hook: called with every event.

    Attributes:
        reserved, peak_reserved: bytes of segments, of expandable ones those mapped; the highest value so far.
        segments: all segments, the oldest first.
        collects: garbage collection is on: it needs a limit to be a share of.
        hook: as given.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        driver: Driver,
        device_memory: int | None,
        limit: int | None,
        hook: Hook | None,
    ) -> None:
        self.settings = settings
        self.hook = hook
        self.reserved = 0
        self.peak_reserved = 0
        self.segments: dict[SimSegment, None] = {}
        self._driver = driver
        self._device_memory = device_memory
        self._limit = _limit(settings, device_memory) if limit is None else limit
        self.collects = self._limit is not None and settings.garbage_collection_threshold > 0
        self._by_age = settings.torch_version >= ORDER_BY_CREATION
        self._created = 0

    def note(self, action: Action, address: int, size: int, arena: Arena) -> None:
        """Tell the hook."""
        if self.hook is not None:
            self.hook(AllocatorEvent(action, address, size, arena.stream, arena.pool.id))

    def ask(self, arena: Arena, rounded: int, needed: int) -> SimBlock | None:
        """A block from the driver, in no list; None when memory or the process's share is out.

        Source: `alloc_block`.

        Args:
            arena: whose block it will be.
            rounded: its size at least.
            needed: size of the segment for it.
        """
        if self.at_limit(needed):
            return None
        if arena.expandable:
            return self._grow(arena, rounded)
        address = self._driver.allocate(needed, arena.stream, arena.pool.id)
        if address is None:
            return None
        segment = self.new_segment(arena, address, needed, None)
        self.count(needed)
        self.note("segment_alloc", address, needed, arena)
        return segment.head

    def at_limit(self, needed: int) -> bool:
        """True if the process may not reserve that much more."""
        return self._limit is not None and self.reserved + needed > self._limit

    @property
    def excess(self) -> int:
        """Bytes reserved beyond the threshold of garbage collection; 0 or less where it is off."""
        if self._limit is None or not self.collects:
            return 0
        return self.reserved - int(self.settings.garbage_collection_threshold * self._limit)

    def refuses(self, needed: int) -> bool:
        """True where the settings forbid to free memory and try again (`throw_on_cudamalloc_oom`).

        With a limit below the whole device, that limit is met first, and it does not forbid it.
        """
        memory = self._device_memory
        return (
            self.settings.throw_on_cudamalloc_oom
            and self._limit is None
            and memory is not None
            and self.reserved + needed > memory
        )

    def new_segment(self, arena: Arena, address: int, size: int, page: int | None) -> SimSegment:
        """Make a segment of one live block known; count no bytes."""
        rank = self._created << CREATION_SHIFT if self._by_age else address
        self._created += 1
        segment = SimSegment(arena, address, size, rank, page)
        self.segments[segment] = None
        return segment

    def again(self, arena: Arena, size: int, page: int | None) -> SimSegment:
        """Make a segment, or a virtual range, that was there before; what is mapped in a range is not
        counted."""
        driver, stream, pool = self._driver, arena.stream, arena.pool.id
        if page is not None:
            return self.new_segment(arena, driver.reserve(size, stream, pool), size, page)
        address = driver.allocate(size, stream, pool)
        assert address is not None, "the driver had room for it before"
        self.count(size)
        return self.new_segment(arena, address, size, None)

    def map_again(self, size: int) -> None:
        """Count bytes of a virtual range as mapped."""
        self._driver.map(0, size)
        self.count(size)

    def count(self, size: int) -> None:
        """Count bytes as reserved."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def range_size(self, arena: Arena) -> int:
        """The virtual range of an expandable segment: 9/8 of the device's memory, in whole pages."""
        size = (self._device_memory or UNKNOWN_DEVICE) * RANGE_NUMERATOR // RANGE_DENOMINATOR
        return -(-size // arena.page) * arena.page

    def release(self, block: SimBlock) -> None:
        """Give a wholly free segment back (`release_block`)."""
        segment, arena = block.segment, block.arena
        arena.remove(block)
        block.state = GONE
        del self.segments[segment]
        self.reserved -= block.size
        self._driver.release(segment.address, block.size)
        self.note("segment_free", segment.address, block.size, arena)

    def release_free(self, arenas: dict[int, Arena]) -> None:
        """Give back what is wholly free: segments first, then pages (`release_blocks`)."""
        free = [block for arena in _by_stream(arenas) for block in arena.blocks]
        for block in free:
            if block.segment.page is None and block.alone:
                self.release(block)
        for block in free:
            if block.segment.page is not None:
                self._unmap(block)
                head = block.segment.head  # a virtual range without memory is forgotten
                if head.state == UNMAPPED and head.alone:
                    head.arena.unmapped.remove(head)
                    head.state = GONE
                    del self.segments[block.segment]

    def release_oversized(self, arena: Arena, rounded: int) -> bool:
        """Give back just enough blocks too big to be split, on this stream; True if that was enough
        (`release_available_cached_blocks`)."""
        most = self.settings.max_split_size
        if most is None:
            return False
        wanted = max(rounded, most)
        blocks = arena.blocks
        at = bisect_left(arena.keys, wanted << SIZE_SHIFT)
        if at < len(blocks) and blocks[at].segment.page is None:
            self.release(blocks[at])
            return True
        freed = 0
        for block in reversed(blocks[:at]):
            if freed >= wanted or block.size < most:
                break
            if block.segment.page is None:
                freed += block.size
                self.release(block)
        return freed >= wanted

    def collect_garbage(self, arenas: dict[int, Arena]) -> None:
        """Give back, while too much is reserved, wholly free segments that were free for longer than the
        average (`garbage_collect_cached_blocks`)."""
        wanted = self.excess
        cached = [block for arena in _by_stream(arenas) for block in arena.blocks if block.alone]
        ages = {block: block.arena.pool.searches - block.born for block in cached}
        freed = 0
        while freed < wanted and ages:
            mean = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if age >= mean and block.segment.page is None]
            if not old:
                return
            for block in old:
                freed += block.size
                del ages[block]
                self.release(block)

    # Pages of expandable segments.

    def _grow(self, arena: Arena, size: int) -> SimBlock | None:
        """A free block of at least `size` bytes, taken out of its arena; None when memory is out.

        What was mapped before memory ran out stays mapped and free.
        """
        block = self._lowest(arena, size)
        if block.state == UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # It has taken in the block in front of it.
        arena.remove(block)
        return block

    def _unmap(self, block: SimBlock) -> None:
        """Take the memory from the whole pages of a free block; parts of pages stay mapped and free."""
        address, size = whole_pages(block)
        if size == 0:
            return
        arena = block.arena
        arena.remove(block)
        before = address - block.address
        if before:
            arena.insert(split_front(block, before))
        rest = block
        if block.size > size:
            block = split_front(rest, size)
            arena.insert(rest)
        block.state = UNMAPPED
        arena.absorb(block, block.prev)
        arena.absorb(block, block.next)
        arena.insert_unmapped(block)
        self._driver.unmap(address, size)
        self.reserved -= size
        self.note("segment_unmap", address, size, arena)

    def _lowest(self, arena: Arena, size: int) -> SimBlock:
        """The lowest block, free or unmapped, behind which enough space is free or unmapped."""
        for unmapped in arena.unmapped:
            before = unmapped.prev
            first = before if before is not None and before.state == FREE else unmapped
            if _space_from(first, size):
                return first
        size = self.range_size(arena)
        segment = self.new_segment(
            arena, self._driver.reserve(size, arena.stream, arena.pool.id), size, arena.page
        )
        arena.insert_unmapped(segment.head)
        return segment.head

    def _map(self, block: SimBlock, size: int) -> bool:
        """Map the pages that `size` bytes need in front of an unmapped block; False when memory is out."""
        segment, arena = block.segment, block.arena
        page = segment.page
        assert page is not None
        address = block.address
        mapped = -(-size // page) * page
        if not self._driver.map(address, mapped):
            return False
        arena.unmapped.remove(block)
        if mapped < block.size:
            rest = SimBlock(arena, segment, block.where + mapped, block.size - mapped)
            rest.prev, rest.next = block, block.next
            if block.next is not None:
                block.next.prev = rest
            block.next = rest
            block.size = mapped
            arena.insert_unmapped(rest)
        block.state = FREE
        arena.absorb(block, block.prev)
        arena.absorb(block, block.next)
        arena.insert(block)
        self.count(mapped)
        self.note("segment_map", address, mapped, arena)
        return True


def _limit(settings: AllocatorSettings, memory: int | None) -> int | None:
    """The most that the process may reserve (`setMemoryFraction`); None for no limit."""
    if settings.memory_fraction is None:
        return None
    if memory is None:
        raise ValueError("a memory fraction needs the device's memory: give device_memory or capacity")
    return int(settings.memory_fraction * memory)


def _by_stream(arenas: dict[int, Arena]) -> Iterator[Arena]:
    """Arenas in the order in which torch's sets hold their blocks: by the stream's handle."""
    return (arenas[stream] for stream in sorted(arenas))


def _space_from(block: SimBlock | None, size: int) -> bool:
    space = 0
    while space < size and block is not None and block.state in (FREE, UNMAPPED):
        space += block.size
        block = block.next
    return space >= size
