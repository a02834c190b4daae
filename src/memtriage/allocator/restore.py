"""Put a simulator into the state in which a recorded trace begins.

Known limitations: the order in which the segments at that time were made is not recorded. If it matters (ties
of equal size from torch 2.13 on, garbage collection), the order of their addresses is used. Blocks that await
a stream during the whole trace do so forever.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from memtriage.allocator.blocks import (
    ALLOCATED,
    AWAITING,
    FREE,
    UNMAPPED,
    Arena,
    SimBlock,
    SimSegment,
    split_front,
)
from memtriage.allocator.recorded_start import Region, StartingState
from memtriage.allocator.settings import SMALL_SEGMENT
from memtriage.allocator.simulator import Simulator

Piece = tuple[int, int, int, int]
"""Address, size, state and requested bytes of a block to be."""


def restore(simulator: Simulator, start: StartingState) -> dict[int, SimBlock]:
    """Make the segments and blocks of a start in a simulator that has handed out nothing yet.

    Returns:
        The live blocks by address.
    """
    used: list[Piece] = [(block.address, block.size, ALLOCATED, block.requested) for block in start.blocks]
    used += [(address, size, AWAITING, 0) for address, size in start.occupied]
    used.sort()
    live: dict[int, SimBlock] = {}
    for region in start.regions:
        if region.page == 0:
            small = region.size <= SMALL_SEGMENT
            arena = simulator.arena(region.pool, region.stream, small=small)
            segment = simulator.backing.new_segment(arena, region.address, region.size, None)
            pieces = _with_gaps(_within(used, region.address, region.end), region.address, region.end, FREE)
            _lay_out(simulator, segment, list(pieces), live)
    for ranges in _virtual_ranges(simulator, start):
        first = ranges[0]
        arena = simulator.arena(first.pool, first.stream, small=first.page == SMALL_SEGMENT)
        size = simulator.backing.range_size(arena)
        mapped = [
            part for region in ranges for part in start.mapped if region.address <= part[0] < region.end
        ]
        if mapped:
            segment = simulator.backing.new_segment(arena, first.address, size, arena.page)
            _lay_out(simulator, segment, _with_unmapped(used, mapped, segment), live)
    return live


def _virtual_ranges(simulator: Simulator, start: StartingState) -> Iterator[list[Region]]:
    """Mapped regions of expandable segments, those of one virtual range together."""
    expandable = [mapping for mapping in start.regions if mapping.page]
    groups: dict[tuple[tuple[int, int], int, int], list[list[Region]]] = {}
    for mapping in sorted(expandable, key=lambda region: region.address):
        known = groups.setdefault((mapping.pool, mapping.stream, mapping.page), [])
        arena = simulator.arena(mapping.pool, mapping.stream, small=mapping.page == SMALL_SEGMENT)
        if known and mapping.end <= known[-1][0].address + simulator.backing.range_size(arena):
            known[-1].append(mapping)
        else:
            known.append([mapping])
    return (ranges for known in groups.values() for ranges in known)


def _within(pieces: list[Piece], address: int, end: int) -> list[Piece]:
    return pieces[bisect_left(pieces, (address,)) : bisect_left(pieces, (end,))]


def _with_unmapped(used: list[Piece], mapped: list[tuple[int, int]], segment: SimSegment) -> list[Piece]:
    whole: list[Piece] = []
    for low, high in mapped:
        whole += _with_gaps(_within(used, low, high), low, high, FREE)
    return list(_with_gaps(whole, segment.address, segment.address + segment.size, UNMAPPED))


def _with_gaps(pieces: list[Piece], address: int, end: int, state: int) -> Iterator[Piece]:
    """The pieces of a range, and what is between them as pieces in a state of their own."""
    edges: list[Piece] = [(address, 0, state, 0), *pieces, (end, 0, state, 0)]
    for before, after in pairwise(edges):
        gap = before[0] + before[1]
        if gap < after[0]:
            yield gap, after[0] - gap, state, 0
        if after[1]:
            yield after


def _lay_out(
    simulator: Simulator, segment: SimSegment, pieces: list[Piece], live: dict[int, SimBlock]
) -> None:
    """Cut a segment of one block into pieces, in order of address."""
    arena: Arena = segment.arena
    rest = segment.head
    for address, size, state, requested in pieces:
        block = split_front(rest, size) if size < rest.size else rest
        if state != UNMAPPED:
            simulator.backing.count(size)
        if state == FREE:
            arena.insert(block)
        elif state == UNMAPPED:
            arena.insert_unmapped(block)
        else:
            block.state = state
            block.requested = requested
            simulator.requested += requested
        if state == ALLOCATED:
            simulator.allocated += size
            live[address] = block
        elif state == AWAITING:
            simulator.awaiting += size
    simulator.reset_peaks()
