"""Laws that hold whatever a program allocates and frees, under every setting."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from memtriage.allocator.blocks import ALLOCATED, AWAITING, FREE, UNMAPPED, SimBlock
from memtriage.allocator.events import AllocatorEvent, OutOfMemory
from memtriage.allocator.settings import MIN_BLOCK, SMALL_LIMIT, parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.model.blocks import DEFAULT_POOL

MIB = 1 << 20
STREAMS = (0, 0x5F, 0x60)
POOLS = (DEFAULT_POOL, (0, 1), (1, 0))
CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "expandable_segments:True,roundup_power2_divisions:[1:2,>:8]",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
    "max_split_size_mb:64,max_non_split_rounding_mb:40,garbage_collection_threshold:0.5,"
    "per_process_memory_fraction:0.9",
    "large_segment_size_mb:32,expandable_segments:True",
)
SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(1, 12 * MIB),
    st.integers(1, 150 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 20 * MIB, 32 * MIB, 64 * MIB]),
)


class Laws(RuleBasedStateMachine):
    """A program that allocates, shares, frees and empties the cache, in any order."""

    blocks = Bundle("blocks")

    @initialize(
        conf=st.sampled_from(CONFS),
        version=st.sampled_from(["2.11", "2.13"]),
        capacity=st.one_of(st.none(), st.integers(40, 600)),
    )
    def begin(self, conf: str, version: str, capacity: int | None) -> None:
        settings = parse_conf(conf, version)
        memory = None if capacity is None else capacity * MIB
        self.simulator = Simulator(
            settings, capacity=memory, device_memory=memory or 1 << 34, hook=self.count
        )
        self.capacity = memory
        self.segments = self.highest = 0
        self.live: dict[SimBlock, int] = {}
        self.waiting: dict[SimBlock, int] = {}

    def count(self, event: AllocatorEvent) -> None:
        """Adds up reserved bytes from the events alone."""
        if event.action in ("segment_alloc", "segment_map"):
            self.segments += event.size
            self.highest = max(self.highest, self.segments)
        elif event.action in ("segment_free", "segment_unmap"):
            self.segments -= event.size

    @rule(target=blocks, size=SIZES, stream=st.sampled_from(STREAMS), pool=st.sampled_from(POOLS))
    def malloc(self, size: int, stream: int, pool: tuple[int, int]) -> object:
        before = {block: self.place(block) for block in self.live}
        fitting = self.fitting(size, stream, pool)
        reserved = self.simulator.reserved
        try:
            block = self.simulator.malloc(size, stream, pool)
        except OutOfMemory:
            assert {block: self.place(block) for block in self.live} == before
            assert self.capacity is not None or self.simulator.settings.memory_fraction is not None
            assert not fitting
            return multiple()
        assert block.size >= block.requested == size
        assert (block.arena.stream, block.arena.pool.id) == (stream, pool)
        if fitting:
            # The smallest block that fits, and of those the first: nothing new from the driver.
            assert self.simulator.reserved == reserved
            assert block.address == fitting
        self.live[block] = size
        return block

    def fitting(self, size: int, stream: int, pool: tuple[int, int]) -> int | None:
        """The address that best fit must choose, looked up the slow way; None where settings refine it."""
        settings = self.simulator.settings
        if settings.expandable_segments or settings.max_split_size or self.simulator._done:
            return None
        rounded = settings.round_size(size)
        found = [
            (block.size, block.where, block.address)
            for block in self.simulator.blocks()
            if block.state == FREE and (block.arena.stream, block.arena.pool.id) == (stream, pool)
            if block.arena.small == (rounded <= SMALL_LIMIT) and block.size >= rounded
        ]
        return min(found)[2] if found else None

    def place(self, block: SimBlock) -> tuple[int, int]:
        return block.address, block.size

    @rule(block=consumes(blocks))
    def free(self, block: SimBlock) -> None:
        size = self.live.pop(block)
        streams = block.streams
        self.simulator.free(block)
        if streams:
            self.waiting[block] = size

    @rule(block=blocks, stream=st.sampled_from(STREAMS))
    def share(self, block: SimBlock, stream: int) -> None:
        self.simulator.record_stream(block, stream)

    @rule(stream=st.sampled_from(STREAMS))
    def stream_done(self, stream: int) -> None:
        self.simulator.stream_done(stream)

    @rule()
    def process_events(self) -> None:
        self.simulator.process_events()

    @rule()
    def empty_cache(self) -> None:
        self.simulator.empty_cache()
        assert self.simulator.awaiting == 0
        for block in self.simulator.blocks():
            if block.arena.pool.id == DEFAULT_POOL and block.state == FREE:
                assert not block.alone
                page = block.segment.page
                if page is not None:
                    offset = block.address - block.segment.address
                    assert -(-offset // page) >= (offset + block.size) // page

    @rule(pool=st.sampled_from(POOLS[1:]))
    def release_pool(self, pool: tuple[int, int]) -> None:
        if pool in self.simulator._pools:
            self.simulator.release_pool(pool)
            self.simulator.empty_cache()
            mine = [block for block in self.simulator.blocks() if block.arena.pool.id == pool]
            assert all(not block.alone or block.state != FREE for block in mine)

    @invariant()
    def every_segment_is_tiled_by_its_blocks(self) -> None:
        for segment in self.simulator.backing.segments:
            blocks = list(segment)
            assert blocks[0].address == segment.address
            assert blocks[0].prev is None
            assert blocks[-1].next is None
            assert sum(block.size for block in blocks) == segment.size
            for left, right in pairwise(blocks):
                assert left.address + left.size == right.address
                assert right.prev is left
                assert not (left.state == right.state and left.state in (FREE, UNMAPPED))
            assert all(block.size > 0 and block.size % MIN_BLOCK == 0 for block in blocks)

    @invariant()
    def segments_do_not_overlap(self) -> None:
        ranges = sorted(
            (segment.address, segment.address + segment.size) for segment in self.simulator.backing.segments
        )
        assert all(left[1] <= right[0] for left, right in pairwise(ranges))

    @invariant()
    def the_counters_are_the_sums_of_the_blocks(self) -> None:
        one = self.simulator
        by_state = dict.fromkeys((ALLOCATED, FREE, AWAITING, UNMAPPED), 0)
        for block in one.blocks():
            by_state[block.state] += block.size
        assert one.allocated == by_state[ALLOCATED] == sum(block.size for block in self.live)
        assert one.awaiting == by_state[AWAITING]
        assert one.reserved == self.segments == by_state[ALLOCATED] + by_state[AWAITING] + by_state[FREE]
        still_waiting = sum(size for block, size in self.waiting.items() if block.state == AWAITING)
        assert one.requested == sum(self.live.values()) + still_waiting
        assert one.reserved == one.active + one.releasable + one.stranded
        assert one.stranded >= 0
        assert one.peak_reserved == self.highest
        assert one.peak_allocated >= one.allocated
        assert self.capacity is None or one.reserved <= self.capacity

    @invariant()
    def the_free_lists_have_the_free_blocks_in_order(self) -> None:
        listed = []
        for pool in self.simulator._pools.values():
            for arena in (*pool.small.values(), *pool.large.values()):
                assert arena.keys == sorted(arena.keys) == [block.key for block in arena.blocks]
                assert all(block.arena is arena for block in arena.blocks)
                assert arena.unmapped == sorted(arena.unmapped, key=lambda block: block.address)
                listed += arena.blocks + arena.unmapped
        free = [block for block in self.simulator.blocks() if block.state in (FREE, UNMAPPED)]
        assert sorted(map(id, listed)) == sorted(map(id, free))

    @invariant()
    def the_snapshot_tells_the_same(self) -> None:
        segments = self.simulator.snapshot()
        assert sum(segment.size for segment in segments) == self.simulator.reserved
        live = sorted((block.address, block.size, size) for block, size in self.live.items())
        told = [
            (block.address, block.size, block.requested)
            for segment in segments
            for block in segment.blocks
            if block.state == "active"
        ]
        assert told == live
        for segment in segments:
            assert segment.blocks[0].address == segment.address
            assert segment.blocks[-1].end == segment.end


TestLaws = Laws.TestCase
TestLaws.settings = hypothesis_settings(max_examples=120, stateful_step_count=40, deadline=None)
