"""Expandable segments: virtual ranges whose pages get memory when it is needed and lose it under pressure.

The rules are those of `try_allocate_expandable_block`, `map_block` and `unmap_block` in
CUDACachingAllocator.cpp: memory is mapped at the lowest address where enough free or unmapped space follows,
in whole pages (2 MiB in the small pool, the large segment size in the large one); whole free pages are
unmapped when the cache is flushed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from memtriage.allocator.blocks import FREE, UNMAPPED, Arena, SimBlock, SimSegment, split_front
from memtriage.allocator.driver import Driver

Notice = Callable[[SimBlock, int, int], None]
"""Called with a block, the address and the size of the pages below it that were mapped or unmapped."""
NewRange = Callable[[Arena], SimSegment]

RANGE_NUMERATOR: Final = 9
RANGE_DENOMINATOR: Final = 8
"""A virtual range is 9/8 of the device's memory, in whole pages."""


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


class Pages:
    """Maps and unmaps the pages of expandable segments.

    Args:
        driver: gives and takes the memory.
        new_range: makes a segment that is nothing but unmapped addresses.
        mapped, unmapped: called at every change.
    """

    def __init__(self, driver: Driver, new_range: NewRange, mapped: Notice, unmapped: Notice) -> None:
        self._driver = driver
        self._new_range = new_range
        self._mapped = mapped
        self._unmapped = unmapped

    def grow(self, arena: Arena, size: int) -> SimBlock | None:
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

    def unmap(self, block: SimBlock) -> None:
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
        self._unmapped(block, address, size)

    def _lowest(self, arena: Arena, size: int) -> SimBlock:
        """The lowest block, free or unmapped, behind which enough space is free or unmapped."""
        for unmapped in arena.unmapped:
            before = unmapped.prev
            first = before if before is not None and before.state == FREE else unmapped
            if _space_from(first, size):
                return first
        return self._new_range(arena).head

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
        self._mapped(block, address, mapped)
        return True


def _space_from(block: SimBlock | None, size: int) -> bool:
    space = 0
    while space < size and block is not None and block.state in (FREE, UNMAPPED):
        space += block.size
        block = block.next
    return space >= size
