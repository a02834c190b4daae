"""Checkpoints of a private pool, from which trees of CUDA graphs record further graphs.

A replayed graph does not call the allocator. Before another graph is recorded after it, the pool is restored
to its state when the first one was recorded. Source: `setCheckpointPoolState` of
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from memtriage.allocator.blocks import ALLOCATED, FREE, UNMAPPED, SimBlock, SimSegment, split_front
from memtriage.allocator.simulator import Simulator

PoolCheckpoint = dict[SimSegment, tuple[tuple[int, bool], ...]]
"""A pool at one moment: by segment, the sizes of its blocks in order of address, and whether each is live."""


def checkpoint(simulator: Simulator, pool: tuple[int, int]) -> PoolCheckpoint:
    """The state of a pool; its segments are there as long as the pool is."""
    return {
        segment: tuple((block.size, block.state == ALLOCATED) for block in segment if block.state != UNMAPPED)
        for segment in simulator.backing.segments
        if segment.arena.pool.id == pool
    }


def restore(simulator: Simulator, state: PoolCheckpoint) -> dict[int, SimBlock]:
    """Put a pool without live blocks back into a state that it had; segments that it got since stay free.

    As in torch, all blocks of a segment are allocated, and then those are freed that were free.

    Returns:
        The live blocks by address.

    Raises:
        ValueError: a block of the pool is live.
    """
    live: dict[int, SimBlock] = {}
    for segment, pieces in state.items():
        made: list[tuple[SimBlock, bool]] = []
        rest: SimBlock | None = segment.head
        for size, was_live in pieces:
            if rest is None or rest.state != FREE:
                raise ValueError("a pool was put back whose blocks are live")
            made.append((_taken(simulator, rest, size), was_live))
            rest = made[-1][0].next
        for block, was_live in made:
            if was_live:
                live[block.address] = block
            else:
                simulator.free(block)
    return live


def _taken(simulator: Simulator, block: SimBlock, size: int) -> SimBlock:
    """The first bytes of a free block, allocated."""
    arena = block.arena
    arena.remove(block)
    front = block
    if size < block.size:
        front = split_front(block, size)
        arena.insert(block)
    front.state = ALLOCATED
    front.requested = size
    simulator.count_allocated(front)
    return front
