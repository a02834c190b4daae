"""Feed a simulator with the allocations and frees of a recorded trace, in order.

The simulator gets what the program requested: sizes, streams, pools, and when a stream was done. The recorded
address of a block is only used to know which block is freed later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.events import OutOfMemory
from memtriage.allocator.simulator import Simulator
from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_UNMAP,
    Events,
)

GIVEN_BACK: Final = (SEGMENT_FREE, SEGMENT_UNMAP)
SOME_STREAM: Final = -1
"""Stands for the stream that a freed block awaits: a recording tells that it awaits one, not which."""


class AwaitingBlock(NamedTuple):
    """A block that awaits a stream, and how often the simulator had waited for all of them when it was freed.

    Once it has again, the block is recycled, and its object may stand for another.
    """

    block: SimBlock
    synchronizations: int


class PoolsByAddress:
    """Which pool an allocation was made from, where the recording does not say so (before torch 2.12).

    Then it is inferred from the segment that has its address at the end, if that was there already; segments
    that were given back before the end count as the default pool's.
    """

    def __init__(self, trace: Events, segments: Sequence[Segment]) -> None:
        private = sorted(
            (area for area in segments if area.pool != DEFAULT_POOL), key=lambda segment: segment.address
        )
        made = np.flatnonzero(trace.kind == SEGMENT_ALLOC)
        last = dict(zip(trace.address[made].tolist(), made.tolist(), strict=True))
        self._starts = [area.address for area in private]
        self._private = [(area.end, last.get(area.address, -1), area.pool) for area in private]

    def of(self, address: int, index: int) -> tuple[int, int]:
        """The pool's id, by the address and the index of the event."""
        at = bisect_right(self._starts, address) - 1
        if at >= 0:
            end, since, pool = self._private[at]
            if address < end and index > since:
                return pool
        return DEFAULT_POOL


class Feed:
    """Events of a trace on their way into a simulator.

    Args:
        simulator: what is fed.
        trace: the events of one device.
        segments: its segments at the end.
        live: blocks that exist already, by the address that the recording gives them.

    Attributes:
        live: blocks handed out and not yet freed, by recorded address.
        waiting: blocks freed that await a stream, by recorded address.
    """

    def __init__(
        self,
        simulator: Simulator,
        trace: Events,
        segments: Sequence[Segment],
        live: dict[int, SimBlock],
    ) -> None:
        self.live = live
        self.waiting: dict[int, AwaitingBlock] = {}
        self._simulator = simulator
        self._pools = PoolsByAddress(trace, segments)
        self._recorded_pools = trace.pool
        self._in_private_pools: dict[int, tuple[int, int]] = {}
        self._kinds: list[int] = trace.kind.tolist()
        self._addresses: list[int] = trace.address.tolist()
        self._sizes: list[int] = trace.size.tolist()
        self._streams: list[int] = trace.stream.tolist()
        at_once = np.zeros(len(trace), np.bool_)
        at_once[:-1] = (trace.kind[1:] == FREE_COMPLETED) & (trace.address[1:] == trace.address[:-1])
        self._at_once: list[bool] = at_once.tolist()

    def event(self, index: int) -> SimBlock | None:
        """Pass one event on; returns the block that an allocation made. Other than block events do nothing.

        Raises:
            OutOfMemory: the allocation failed.
        """
        kind = self._kinds[index]
        address = self._addresses[index]
        if kind == ALLOC:
            pool = self.pool(index)
            block = self._simulator.malloc(self._sizes[index], self._streams[index], pool)
            self.live[address] = block
            if pool != DEFAULT_POOL:
                self._in_private_pools[address] = pool
            return block
        if kind == FREE_REQUESTED:
            self._free(address, at_once=self._at_once[index])
        elif kind == FREE_COMPLETED:
            if address in self.waiting:
                self.complete(self.waiting.pop(address))
            else:
                # Free already, or the free was asked for before the trace began.
                self._free(address, at_once=True)
        return None

    def complete(self, waiting: AwaitingBlock) -> None:
        """Recycle a block if it still awaits its stream."""
        if waiting.synchronizations == self._simulator.synchronizations:
            self._simulator.complete(waiting.block)

    def empty_cache(self, index: int) -> None:
        """Empty the cache where the recording did, beginning with this event.

        Only a segment of a private pool that is given back shows that the pool was released.
        """
        for event in range(index, len(self._kinds)):
            if self._kinds[event] not in GIVEN_BACK:
                break
            first, end = self._addresses[event], self._addresses[event] + self._sizes[event]
            inside = {pool for address, pool in self._in_private_pools.items() if first <= address < end}
            for pool in inside:
                self._simulator.release_pool(pool)
        self._simulator.empty_cache()

    def can_allocate(self, index: int) -> bool:
        """Ask for what a recorded `oom` event asked for, and give it back; False if it fails again."""
        try:
            self._simulator.free(self._simulator.malloc(self._sizes[index], self._streams[index]))
        except OutOfMemory:
            return False
        return True

    def _free(self, address: int, *, at_once: bool) -> None:
        block = self.live.pop(address, None)
        if block is None:
            return
        if not at_once:
            self._simulator.record_stream(block, SOME_STREAM)
            self.waiting[address] = AwaitingBlock(block, self._simulator.synchronizations)
        self._simulator.free(block)

    def pool(self, index: int) -> tuple[int, int]:
        """The pool of an allocation."""
        return self._recorded_pools.get(index) or self._pools.of(self._addresses[index], index)
