"""The segments that a holder's storages pin: a tiny storage can pin a large segment. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from memtriage.account.segments import releasable_in
from memtriage.model.blocks import DEFAULT_POOL, Block, Segment
from memtriage.model.holders import SegmentPinning


def pinned_by(segments: Iterable[Segment], storages: Iterable[tuple[str, int, int]]) -> SegmentPinning:
    """Return what storages pin, and what could be released if they were freed.

    Args:
        segments: the allocator's segments, of any devices.
        storages: (device, base address, bytes); those outside every segment do not count.

    In an expandable segment only the pages with a part of a storage are pinned. A private pool keeps even
    empty segments: nothing in it is releasable.
    """
    addresses: defaultdict[str, list[int]] = defaultdict(list)
    for device, address, _ in storages:
        addresses[device].append(address)
    for of_device in addresses.values():
        of_device.sort()
    count = nbytes = releasable = 0
    for segment in segments:
        own = _blocks_of(segment, addresses.get(f"cuda:{segment.device}", ()))
        if own:
            count += 1
            nbytes += _reached(segment, own)
            if segment.pool == DEFAULT_POOL:
                releasable += releasable_in(without(segment, own)) - releasable_in(segment)
    return SegmentPinning(segments=count, nbytes=nbytes, releasable=releasable)


def _blocks_of(segment: Segment, addresses: Sequence[int]) -> set[int]:
    """Return the addresses of the live blocks that contain one of these addresses."""
    first = bisect_right(addresses, segment.address - 1)
    last = bisect_right(addresses, segment.end - 1)
    starts = [block.address for block in segment.blocks]
    positions = {bisect_right(starts, address) - 1 for address in addresses[first:last]}
    blocks = [segment.blocks[position] for position in positions if position >= 0]
    return {block.address for block in blocks if block.state != "free"}


def _reached(segment: Segment, own: set[int]) -> int:
    if segment.page is None:
        return segment.size
    pages: set[int] = set()
    for block in segment.blocks:
        if block.address in own:
            first = (block.address - segment.address) // segment.page
            last = -(-(block.end - segment.address) // segment.page)
            pages.update(range(first, last))
    return min(len(pages) * segment.page, segment.size)


def without(segment: Segment, addresses: set[int]) -> Segment:
    """Return the segment with the blocks at these addresses freed and merged with free neighbors."""
    blocks: list[Block] = []
    for block in segment.blocks:
        free = block.address in addresses or block.state == "free"
        if free and blocks and blocks[-1].state == "free":
            blocks[-1] = msgspec.structs.replace(blocks[-1], size=blocks[-1].size + block.size)
        elif free:
            blocks.append(Block(address=block.address, size=block.size, requested=0, state="free"))
        else:
            blocks.append(block)
    return msgspec.structs.replace(segment, blocks=tuple(blocks))
