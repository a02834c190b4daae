"""A simulator of PyTorch's CUDA caching allocator, exact to the byte.

Given the allocations and frees of a program, it makes the same segments, reserves the same bytes and runs out
of memory at the same instant. The rules are those of c10/cuda/CUDACachingAllocator.cpp; if versions differ,
`AllocatorSettings.torch_version` decides.

    simulator = Simulator(parse_conf("max_split_size_mb:256"), capacity=80 << 30)
    block = simulator.malloc(11 << 20)
    simulator.free(block)
    simulator.reserved

- Rounding: to 512 bytes; with `roundup_power2_divisions` to the next of the steps between two powers of two,
  if the request exceeds 512 bytes x divisions.
- Pools: up to 1 MiB small, above large; one set of free blocks for each pool, size class and stream.
- Segments: small 2 MiB; large below 10 MiB `large_segment_size_mb` (20 MiB); from 10 MiB on the next
  multiple of 2 MiB. Expandable: one virtual range of 9/8 of the device for each pool, size class and stream;
  pages of 2 MiB (small) or of the large segment size, mapped at the lowest address that has room.
- Best fit: the smallest free block that is large enough; ties by address (up to torch 2.12) or by age of the
  segment (since 2.13). With expandable segments a block counts with the unmapped space after it, and the
  search continues while the next one counts for less.
- Splitting: the rest of a block is split off if it has at least 512 bytes (small pool, expandable segments)
  or more than 1 MiB (large pool). Otherwise it is slack and counts as allocated.
- `max_split_size_mb`: blocks of that size or more are not split, serve no smaller request, and no request
  they exceed by `max_non_split_rounding_mb`; under pressure they are freed first, just enough of them.
- Freeing merges with free neighbors. After `record_stream` the block awaits the stream and is recycled by
  the next allocation after `stream_done`.
- No free block fits: garbage collection (`garbage_collection_threshold`, only with a limit), then the
  driver, then freeing oversized blocks, then all wholly free segments, then one more try, then
  `OutOfMemory`.
- Private pools are kept until `release_pool`. Up to torch 2.11 their allocations recycle nothing and never
  flush, as while a graph is captured.

Sizes are bytes. Known limitations: one device, one thread. There is no time: the caller says when the work of
a stream is done (`stream_done`). Not simulated: a `MemPool` with another allocator,
`MemPool(use_on_oom=True)`, `graph_capture_record_stream_reuse`, IPC, allocations of other threads during a
`MemPool` or a capture, settings that change while the program runs. `checkpoints.py` restores pools of CUDA
graph trees to earlier states.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import groupby

from memtriage.allocator.backing import Backing
from memtriage.allocator.blocks import (
    ALLOCATED,
    AWAITING,
    FREE,
    GONE,
    SIZE_SHIFT,
    UNMAPPED,
    Arena,
    SimBlock,
    SimPool,
    SimSegment,
    expandable_size,
    whole_pages,
)
from memtriage.allocator.driver import Driver
from memtriage.allocator.events import Hook, OutOfMemory
from memtriage.allocator.settings import MIN_BLOCK, SMALL_LIMIT, USER_POOLS_PROCESS_EVENTS, AllocatorSettings
from memtriage.model.blocks import DEFAULT_POOL, Block, BlockState, Segment

_STATES: dict[int, BlockState] = {ALLOCATED: "active", AWAITING: "awaiting", FREE: "free"}


class Simulator:
    """The allocator of one device.

    Args:
        settings: the configuration, see `parse_conf`; None for the defaults of the newest torch.
        capacity: bytes that the driver has for this allocator; None for no limit. Not with `driver`.
        limit: bytes that the process may reserve, instead of `Settings.memory_fraction`. Unlike the driver's
            capacity it is checked against the size of a segment, even where pages are mapped.
        device_memory: the device's memory in bytes: `Settings.memory_fraction` is a share of it, virtual
            ranges of expandable segments are 9/8 of it. None for the driver's capacity.
        driver: gives addresses and says when memory is out.
        hook: called with every event.
        device: CUDA index, for snapshots.

    Attributes:
        settings: as given.
        allocated: bytes of live blocks, with rounding.
        requested: bytes asked for, of live blocks and of those that await a stream.
        awaiting: bytes of blocks freed that await a stream.
        peak_allocated: highest value since `reset_peaks`.
        retries: allocations tried again after the cache was flushed.
        ooms: allocations that failed.
        synchronizations: times that all streams were waited for.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        capacity: int | None = None,
        limit: int | None = None,
        device_memory: int | None = None,
        driver: Driver | None = None,
        hook: Hook | None = None,
        device: int = 0,
    ) -> None:
        if driver is not None and capacity is not None:
            raise ValueError("give a capacity or a driver, not both: a driver has a capacity of its own")
        self.settings = settings = settings or AllocatorSettings()
        self.allocated = self.requested = self.awaiting = self.peak_allocated = 0
        self.retries = self.ooms = self.synchronizations = 0
        self._hook = hook
        self._device = device
        driver = driver or Driver(capacity)
        self.backing = Backing(settings, driver, device_memory or driver.capacity, limit, hook)
        self._collects = self.backing.collects
        self._divides = any(divisions > 1 for divisions in settings.roundup_power2_divisions)
        self._plain = (
            not settings.expandable_segments and not self._collects and settings.max_split_size is None
        )
        self._waiting: dict[int, deque[SimBlock]] = {}
        self._done: dict[int, int] = {}
        self._pools: dict[tuple[int, int], SimPool] = {}
        self._default = self._pool(DEFAULT_POOL)
        self._small = self._default.small
        self._large = self._default.large

    # `malloc` and `free` are written flat, without helper calls: that is worth a third of their speed.

    def malloc(self, size: int, stream: int = 0, pool: tuple[int, int] = DEFAULT_POOL) -> SimBlock:
        """Allocate.

        Args:
            size: bytes, at least 1 (torch never asks its allocator for 0).
            stream: handle of the stream it is for.
            pool: a private pool becomes known with its first allocation.

        Raises:
            OutOfMemory: nothing was handed out.
        """
        if size <= 0:
            raise ValueError(f"an allocation should be of at least 1 byte, not {size}")
        if self._done and not self._pool(pool).capturing:
            self.process_events()
        rounded = self.settings.round_size(size) if self._divides else (size + MIN_BLOCK - 1) & -MIN_BLOCK
        arena = None
        if pool is DEFAULT_POOL or pool == DEFAULT_POOL:
            arena = (self._small if rounded <= SMALL_LIMIT else self._large).get(stream)
        if arena is None:
            arena = self.arena(pool, stream, small=rounded <= SMALL_LIMIT)
        keys = arena.keys
        at = bisect_left(keys, rounded << SIZE_SHIFT)
        if not self._plain:
            if self._collects and not arena.small:
                arena.pool.searches += 1
            at = self._best(arena, rounded, at)
        if at < len(keys):
            del keys[at]
            block = arena.blocks.pop(at)
        else:
            block = self._grow(arena, size, rounded)
        rest = block.size - rounded
        if rest >= arena.least_rest and rounded < arena.split_limit:
            # `split_front` and `Arena.insert`: the front is handed out, the rest keeps its object.
            where = block.where
            front = SimBlock(arena, block.segment, where, rounded)
            before = block.prev
            front.prev = before
            front.next = block
            if before is None:
                block.segment.head = front
            else:
                before.next = front
            block.prev = front
            block.where = where = where + rounded
            block.size = rest
            block.state = FREE
            block.key = key = (rest << SIZE_SHIFT) + where
            at = bisect_left(keys, key)
            keys.insert(at, key)
            arena.blocks.insert(at, block)
            block = front
        else:
            rounded += rest
            block.state = ALLOCATED
        block.requested = size
        self.requested += size
        self.allocated = allocated = self.allocated + rounded
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        if self._hook is not None:
            self.backing.note("alloc", block.address, size, arena)
        return block

    def count_allocated(self, block: SimBlock) -> None:
        """Count a block that was made live outside of `malloc`."""
        self.requested += block.requested
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.backing.note("alloc", block.address, block.requested, block.arena)

    def free(self, block: SimBlock) -> None:
        """Free a block. If other streams use it (`record_stream`), it awaits them.

        Raises:
            ValueError: the block is not live.
        """
        if block.state != ALLOCATED:
            raise ValueError("a block was freed that is not live")
        self.allocated -= block.size
        if self._hook is not None:
            self.backing.note("free_requested", block.address, block.requested, block.arena)
        if block.streams:
            streams, block.streams = block.streams or set(), None
            block.state = AWAITING
            block.events = len(streams)
            self.awaiting += block.size
            for stream in streams:
                self._waiting.setdefault(stream, deque()).append(block)
        else:
            self._recycle(block)

    def _recycle(self, block: SimBlock) -> None:
        """Make a block free and merge it with its free neighbors."""
        arena = block.arena
        if self._hook is not None:
            self.backing.note("free_completed", block.address, block.requested, arena)
        self.requested -= block.requested
        # `Arena.absorb` for both neighbors and `Arena.insert`.
        keys = arena.keys
        blocks = arena.blocks
        size = block.size
        other = block.prev
        if other is not None and other.state == FREE:
            at = bisect_left(keys, other.key)
            del keys[at]
            del blocks[at]
            size += other.size
            block.where = other.where
            block.prev = before = other.prev
            if before is None:
                block.segment.head = block
            else:
                before.next = block
            other.state = GONE
        other = block.next
        if other is not None and other.state == FREE:
            at = bisect_left(keys, other.key)
            del keys[at]
            del blocks[at]
            size += other.size
            block.next = behind = other.next
            if behind is not None:
                behind.prev = block
            other.state = GONE
        block.size = size
        block.state = FREE
        if self._collects:
            block.born = arena.pool.searches
        block.key = key = (size << SIZE_SHIFT) + block.where
        at = bisect_left(keys, key)
        keys.insert(at, key)
        blocks.insert(at, block)

    # Streams.

    def record_stream(self, block: SimBlock, stream: int) -> None:
        """Say that another stream uses a live block (`Tensor.record_stream`)."""
        if block.state != ALLOCATED:
            raise ValueError("record_stream of a block that is not live")
        if stream != block.arena.stream:
            block.streams = (block.streams or set()) | {stream}

    def stream_done(self, stream: int) -> None:
        """Say that a stream has passed everything put on it so far.

        What awaited it is recycled by the next allocation (or `process_events`), as torch asks only then.
        """
        waiting = self._waiting.get(stream)
        if waiting:
            self._done[stream] = len(waiting)

    def process_events(self) -> None:
        """Recycle the blocks whose streams are done."""
        done, self._done = self._done, {}
        for stream, count in done.items():
            waiting = self._waiting[stream]
            for _ in range(count):
                block = waiting.popleft()
                block.events -= 1
                if block.events == 0:
                    self.awaiting -= block.size
                    self._recycle(block)

    def complete(self, block: SimBlock) -> None:
        """Recycle a block that awaits streams, whatever they are doing: for a recording that tells when.

        Raises:
            ValueError: the block awaits nothing.
        """
        if block.state != AWAITING:
            raise ValueError("a block was completed that awaits nothing")
        for stream, waiting in self._waiting.items():
            if block in waiting:
                place = waiting.index(block)
                del waiting[place]
                if place < self._done.get(stream, 0):
                    self._done[stream] -= 1
        self.awaiting -= block.size
        self._recycle(block)

    def synchronize(self) -> None:
        """Wait for every stream and recycle what awaited it."""
        self.synchronizations += 1
        for stream in self._waiting:
            self.stream_done(stream)
        self.process_events()

    # Pools and the cache.

    def _pool(self, pool: tuple[int, int]) -> SimPool:
        known = self._pools.get(pool)
        if known is None:
            capturing = pool != DEFAULT_POOL and self.settings.torch_version < USER_POOLS_PROCESS_EVENTS
            known = self._pools[pool] = SimPool(pool, capturing=capturing)
        return known

    def release_pool(self, pool: tuple[int, int]) -> None:
        """Say that nobody uses a private pool any more (its graphs or its `MemPool` are gone).

        Its free segments go back to the driver when the cache is next emptied.

        Raises:
            KeyError: the pool is not known.
        """
        self._pools[pool].released = True

    def empty_cache(self) -> None:
        """Give wholly free segments and pages back: `torch.cuda.empty_cache()`.

        Waits for all streams first. Private pools are spared until they are released.
        """
        self.synchronize()
        self.backing.release_free(self._default.large)
        self.backing.release_free(self._default.small)
        for pool in self._pools.values():
            if pool.released:
                self.backing.release_free(pool.small)
                self.backing.release_free(pool.large)

    def arena(self, pool: tuple[int, int], stream: int, *, small: bool) -> Arena:
        """The free blocks of a pool, size class and stream; made if there is none."""
        known = self._pool(pool)
        arenas = known.small if small else known.large
        arena = arenas.get(stream)
        if arena is None:
            arena = arenas[stream] = Arena(known, stream, small=small, settings=self.settings)
        return arena

    # What is where.

    @property
    def reserved(self) -> int:
        """Bytes of segments, of expandable ones those mapped."""
        return self.backing.reserved

    @property
    def peak_reserved(self) -> int:
        """Highest `reserved` since `reset_peaks`."""
        return self.backing.peak_reserved

    @property
    def active(self) -> int:
        """Bytes of live blocks and of those that await a stream."""
        return self.allocated + self.awaiting

    @property
    def releasable(self) -> int:
        """Free bytes in wholly free segments and pages, of all pools."""
        return sum(
            whole_pages(block)[1] if block.segment.page is not None else block.size if block.alone else 0
            for pool in self._pools.values()
            for arena in (*pool.small.values(), *pool.large.values())
            for block in arena.blocks
        )

    @property
    def stranded(self) -> int:
        """Free bytes that cannot go back to the driver: something live shares their segment or page."""
        return self.reserved - self.active - self.releasable

    def pressed_by(self, size: int, stream: int, pool: tuple[int, int]) -> bool:
        """True if such a request would find no cached block, and have memory given back first."""
        rounded = self.settings.round_size(size)
        arena = self.arena(pool, stream, small=rounded <= SMALL_LIMIT)
        at = self._best(arena, rounded, bisect_left(arena.keys, rounded << SIZE_SHIFT))
        if at < len(arena.blocks):
            return False
        return self.backing.at_limit(self.settings.segment_size(rounded)) or self.backing.excess > 0

    def reset_peaks(self) -> None:
        """Let the peaks begin again at the present values."""
        self.peak_allocated = self.allocated
        self.backing.peak_reserved = self.backing.reserved

    def blocks(self) -> Iterator[SimBlock]:
        """Every block, also unmapped ones, segment by segment and in order of address."""
        return (block for segment in self.backing.segments for block in segment)

    def pools(self) -> tuple[tuple[int, int], ...]:
        """The ids of the pools that are known."""
        return tuple(self._pools)

    def waiting(self) -> Iterator[tuple[int, int, tuple[SimBlock, ...]]]:
        """By stream: how many of the blocks that await it have it done, and those blocks in order."""
        return (
            (stream, self._done.get(stream, 0), tuple(blocks))
            for stream, blocks in sorted(self._waiting.items())
            if blocks
        )

    def put_off(self, stream: int, blocks: deque[SimBlock], done: int) -> None:
        """Make blocks await a stream, as `waiting` tells them."""
        self._waiting[stream] = blocks
        if done:
            self._done[stream] = done

    def snapshot(self) -> tuple[Segment, ...]:
        """The segments by address, as `torch.cuda.memory_snapshot()` tells them: of an expandable segment one
        for each contiguous mapped range."""
        parts = (part for segment in self.backing.segments for part in _parts(segment, self._device))
        return tuple(sorted(parts, key=lambda part: part.address))

    # When no cached block simply fits.

    def _best(self, arena: Arena, rounded: int, at: int) -> int:
        """The index of the free block to use, or their number for none: the whole of `get_free_block`."""
        blocks = arena.blocks
        none = len(blocks)
        if at == none:
            return none
        # Best fit of expandable blocks goes by the size that they can grow to.
        while (
            blocks[at].segment.page is not None
            and at + 1 < none
            and expandable_size(blocks[at + 1]) < expandable_size(blocks[at])
        ):
            at += 1
        most = self.settings.max_split_size
        if most is None:
            return at
        size = blocks[at].size
        too_big = size >= most if rounded < most else size >= rounded + self.settings.max_non_split_rounding
        return none if too_big else at

    def _grow(self, arena: Arena, size: int, rounded: int) -> SimBlock:
        """A block from the driver, after freeing what can be freed if need be."""
        backing = self.backing
        needed = self.settings.segment_size(rounded)
        if self._collects:
            backing.collect_garbage(self._large)
        block = backing.ask(arena, rounded, needed)
        if block is None and not backing.refuses(needed):
            if backing.release_oversized(arena, rounded):
                block = backing.ask(arena, rounded, needed)
            if block is None and not arena.pool.capturing:
                self.empty_cache()
                self.retries += 1
                block = backing.ask(arena, rounded, needed)
        if block is None:
            self.ooms += 1
            backing.note("oom", 0, rounded, arena)
            raise OutOfMemory(size, needed, self.allocated, self.reserved)
        return block


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
