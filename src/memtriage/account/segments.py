"""What the allocator's segments consist of, and what pins those that cannot return to the driver.

Pure: no torch, no driver. Sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from memtriage.model.blocks import DEFAULT_POOL, Block, Segment


class SegmentTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of segments consists of, in bytes.

    `reserved` = `requested` + `rounding` + `awaiting` + `releasable` + `stranded`; `private_pools` is the
    part of `reserved` outside the default pool.
    """

    reserved: int
    requested: int
    rounding: int
    awaiting: int
    releasable: int
    stranded: int
    private_pools: int

    @property
    def allocated(self) -> int:
        """Bytes of live blocks."""
        return self.requested + self.rounding


class StrandedSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment whose free bytes cannot return to the driver, and what pins them.

    Attributes:
        stranded: its free bytes that cannot be released.
        pins: its blocks that are in use, biggest first.
    """

    segment: Segment
    stranded: int
    pins: tuple[Block, ...]


def segment_totals(segments: Iterable[Segment]) -> SegmentTotals:
    """Divide the bytes of segments by use; see `SegmentTotals`."""
    sums: Counter[str] = Counter()
    for segment in segments:
        releasable = releasable_in(segment)
        sums["reserved"] += segment.size
        sums["releasable"] += releasable
        sums["private"] += segment.size if segment.pool != DEFAULT_POOL else 0
        sums["free"] += free_in(segment)
        for block in segment.blocks:
            sums["requested"] += block.requested if block.state == "active" else 0
            sums["rounding"] += block.size - block.requested if block.state == "active" else 0
            sums["awaiting"] += block.size if block.state == "awaiting" else 0
    return SegmentTotals(
        reserved=sums["reserved"],
        requested=sums["requested"],
        rounding=sums["rounding"],
        awaiting=sums["awaiting"],
        releasable=sums["releasable"],
        stranded=sums["free"] - sums["releasable"],
        private_pools=sums["private"],
    )


def releasable_in(segment: Segment) -> int:
    """Return free bytes that `empty_cache()` returns: a wholly free segment, or wholly free pages.

    A segment of a private pool counts, too, although the allocator keeps it as long as its pool lives. For
    expandable segments the pool's default page size is assumed (a snapshot does not have it).
    """
    if all(block.state == "free" for block in segment.blocks):
        return free_in(segment)
    if segment.page is None:
        return 0
    return sum(_whole_pages(block, segment) for block in segment.blocks if block.state == "free")


def whole_pages(block: Block, segment: Segment) -> tuple[int, int]:
    """Return start and end of the pages wholly inside a block; pages count from the segment's first byte.

    As in `ExpandableSegment::unmap`, a mapped range begins at a page, and a partly used page stays. Both are
    the block's start if there is no such page, or the segment is not expandable.
    """
    if segment.page is None:
        return block.address, block.address
    first = -(-(block.address - segment.address) // segment.page)
    last = (block.end - segment.address) // segment.page
    if last <= first:
        return block.address, block.address
    return segment.address + first * segment.page, segment.address + last * segment.page


def stranded_in(segment: Segment) -> int:
    """Return free bytes that `empty_cache()` cannot return."""
    return free_in(segment) - releasable_in(segment)


def stranded_segments(segments: Iterable[Segment]) -> list[StrandedSegment]:
    """Return the segments with stranded bytes, the worst first."""
    stranding = [
        StrandedSegment(segment=segment, stranded=stranded, pins=_pins(segment))
        for segment in segments
        if (stranded := stranded_in(segment)) > 0
    ]
    return sorted(stranding, key=lambda segment: (-segment.stranded, segment.segment.address))


def free_in(segment: Segment) -> int:
    """Return the bytes of a segment that are free."""
    return sum(block.size for block in segment.blocks if block.state == "free")


def _pins(segment: Segment) -> tuple[Block, ...]:
    used = (block for block in segment.blocks if block.state != "free")
    return tuple(sorted(used, key=lambda block: (-block.size, block.address)))


def _whole_pages(block: Block, segment: Segment) -> int:
    start, end = whole_pages(block, segment)
    return end - start
