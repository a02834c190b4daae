"""The simulator's segments as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from memtriage.allocator.blocks import ALLOCATED, AWAITING, FREE, UNMAPPED, SimBlock, SimSegment
from memtriage.model.blocks import Block, BlockState, Segment

_STATES: dict[int, BlockState] = {ALLOCATED: "active", AWAITING: "awaiting", FREE: "free"}


def segments_of(segments: Iterable[SimSegment], device: int) -> tuple[Segment, ...]:
    """Segments by address, with their blocks; of an expandable one every contiguous mapped range."""
    parts = (part for segment in segments for part in _parts(segment, device))
    return tuple(sorted(parts, key=lambda part: part.address))


def _parts(segment: SimSegment, device: int) -> Iterator[Segment]:
    for unmapped, run in groupby(segment, key=lambda block: block.state == UNMAPPED):
        if unmapped:
            continue
        blocks = tuple(_plain(block) for block in run)
        yield Segment(
            device=device,
            address=blocks[0].address,
            size=blocks[-1].end - blocks[0].address,
            stream=segment.arena.stream,
            pool=segment.arena.pool.id,
            expandable=segment.page is not None,
            page=segment.page,
            blocks=blocks,
        )


def _plain(block: SimBlock) -> Block:
    return Block(
        address=block.address,
        size=block.size,
        requested=block.requested if block.state != FREE else 0,
        state=_STATES[block.state],
    )
