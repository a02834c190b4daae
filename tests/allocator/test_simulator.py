"""The rules of the caching allocator, one by one."""

from __future__ import annotations

import pytest
from tests.allocator.simulators import MIB, SegmentLog, simulator

from memtriage.allocator.blocks import FREE, SimBlock
from memtriage.allocator.driver import Driver
from memtriage.allocator.events import AllocatorEvent, OutOfMemory

POOL = (0, 7)


def test_the_classic_walk_through_segment_sizes() -> None:
    one = simulator()
    blocks = [one.malloc(1)]
    assert (one.allocated, one.reserved) == (512, 2 * MIB)
    blocks.append(one.malloc(3 * MIB))
    assert one.reserved == 22 * MIB
    blocks.append(one.malloc(11 * MIB + 1))  # Fits what is left of the 20 MiB.
    assert one.reserved == 22 * MIB
    blocks.append(one.malloc(12 * MIB + 1))
    assert one.reserved == 36 * MIB
    for block in blocks:
        one.free(block)
    one.empty_cache()
    assert (one.allocated, one.requested, one.reserved, one.snapshot()) == (0, 0, 0, ())
    assert one.peak_reserved == 36 * MIB


def test_small_and_large_pools_do_not_mix() -> None:
    one = simulator()
    one.free(one.malloc(20 * MIB))
    one.malloc(MIB)
    assert one.reserved == 22 * MIB
    one.malloc(MIB + 1)
    assert one.reserved == 22 * MIB


def test_streams_and_private_pools_do_not_share() -> None:
    one = simulator()
    one.free(one.malloc(30 * MIB))
    one.malloc(30 * MIB, stream=5)
    one.malloc(30 * MIB, pool=POOL)
    one.malloc(30 * MIB)
    assert one.reserved == 90 * MIB
    assert sorted((segment.stream, segment.pool) for segment in one.snapshot()) == [
        (0, (0, 0)),
        (0, POOL),
        (5, (0, 0)),
    ]


def test_best_fit_takes_the_smallest_that_is_large_enough() -> None:
    one = simulator()
    blocks = {size: one.malloc(size * MIB) for size in (50, 30, 40)}
    addresses = {size: block.address for size, block in blocks.items()}
    for block in blocks.values():
        one.free(block)
    assert one.malloc(30 * MIB - 512).address == addresses[30]
    assert one.malloc(31 * MIB).address == addresses[40]


def test_a_large_block_keeps_up_to_one_mib_of_slack() -> None:
    one = simulator()
    one.free(one.malloc(30 * MIB))
    with_slack = one.malloc(29 * MIB)
    assert with_slack.size == one.allocated == 30 * MIB
    one.free(with_slack)
    assert one.malloc(29 * MIB - 512).size == 29 * MIB - 512


def test_a_small_block_is_split_to_the_byte() -> None:
    one = simulator()
    one.malloc(2 * MIB - MIB - 512)
    assert one.malloc(MIB).size == MIB
    assert (one.reserved, one.allocated) == (2 * MIB, 2 * MIB - 512)
    one.malloc(512)
    assert one.reserved == one.allocated == 2 * MIB


def test_free_neighbors_become_one_block() -> None:
    one = simulator()
    blocks = [one.malloc(5 * MIB) for _ in range(4)]
    for index in (0, 2, 3, 1):
        one.free(blocks[index])
    (segment,) = one.snapshot()
    assert [(block.size, block.state) for block in segment.blocks] == [(20 * MIB, "free")]


def test_a_block_can_be_freed_once() -> None:
    one = simulator()
    block = one.malloc(512)
    one.free(block)
    with pytest.raises(ValueError, match="not live"):
        one.free(block)
    with pytest.raises(ValueError, match="at least 1 byte"):
        one.malloc(0)


class TestLimits:
    """Memory that is out: flushes, retries, errors."""

    def test_the_cache_is_flushed_before_giving_up(self) -> None:
        log = SegmentLog()
        one = simulator(capacity=100 * MIB, hook=log)
        one.free(one.malloc(60 * MIB))
        one.malloc(70 * MIB)
        assert log == [
            ("segment_alloc", 60 * MIB),
            ("segment_free", 60 * MIB),
            ("segment_alloc", 70 * MIB),
        ]
        assert (one.retries, one.ooms, one.reserved) == (1, 0, 70 * MIB)

    def test_out_of_memory_leaves_live_blocks_as_they_are(self) -> None:
        log = SegmentLog()
        one = simulator(capacity=100 * MIB, hook=log)
        one.malloc(40 * MIB)
        one.free(one.malloc(50 * MIB))
        before = [block for block in one.blocks() if block.state != FREE]
        with pytest.raises(OutOfMemory) as error:
            one.malloc(64 * MIB + 1)
        assert log[-2:] == [("segment_free", 50 * MIB), ("oom", 64 * MIB + 512)]
        assert (error.value.requested, error.value.segment) == (64 * MIB + 1, 66 * MIB)
        assert (error.value.allocated, error.value.reserved) == (40 * MIB, 40 * MIB)
        assert "64.0 MiB asked for, 66.0 MiB needed" in str(error.value)
        assert [block for block in one.blocks() if block.state != FREE] == before
        assert (one.retries, one.ooms) == (1, 1)
        one.malloc(60 * MIB)

    def test_an_out_of_memory_event_has_no_address(self) -> None:
        events: list[AllocatorEvent] = []
        one = simulator(capacity=MIB, hook=events.append)
        with pytest.raises(OutOfMemory):
            one.malloc(513, stream=7)
        assert events == [AllocatorEvent("oom", 0, 1024, 7, (0, 0))]

    def test_a_capacity_or_a_driver(self) -> None:
        with pytest.raises(ValueError, match="not both"):
            simulator(capacity=1, driver=Driver())


class TestMaxSplitSize:
    """`max_split_size_mb`."""

    def test_oversized_blocks_are_not_split_and_not_used_for_less(self) -> None:
        one = simulator("max_split_size_mb:64")
        one.free(one.malloc(100 * MIB))
        one.malloc(30 * MIB)
        assert one.reserved == 130 * MIB
        assert one.malloc(90 * MIB).size == 100 * MIB
        assert one.reserved == 130 * MIB

    def test_a_block_of_that_very_size_is_oversized(self) -> None:
        one = simulator("max_split_size_mb:64")
        one.free(one.malloc(64 * MIB))
        one.malloc(30 * MIB)
        assert one.reserved == 94 * MIB

    def test_an_oversized_block_may_be_so_much_bigger_and_no_more(self) -> None:
        one = simulator("max_split_size_mb:64")
        one.free(one.malloc(100 * MIB))
        one.malloc(80 * MIB)
        assert one.reserved == 180 * MIB
        rounding = simulator("max_split_size_mb:64,max_non_split_rounding_mb:40")
        rounding.free(rounding.malloc(100 * MIB))
        assert rounding.malloc(80 * MIB).size == 100 * MIB

    def test_smaller_blocks_are_split_as_ever(self) -> None:
        one = simulator("max_split_size_mb:64")
        one.free(one.malloc(60 * MIB))
        one.malloc(30 * MIB)
        one.malloc(30 * MIB)
        assert one.reserved == 60 * MIB


class TestStreams:
    """Blocks that other streams use."""

    def test_a_block_awaits_the_stream_and_then_the_next_allocation(self) -> None:
        one = simulator()
        block = one.malloc(30 * MIB)
        one.record_stream(block, 9)
        one.free(block)
        assert (one.allocated, one.awaiting, one.active, one.requested) == (0, *[30 * MIB] * 3)
        assert one.malloc(30 * MIB).address != block.address
        one.stream_done(9)
        assert one.awaiting == 30 * MIB
        assert one.malloc(30 * MIB).address == block.address
        assert (one.awaiting, one.reserved) == (0, 60 * MIB)

    def test_it_awaits_every_stream(self) -> None:
        one = simulator()
        block = one.malloc(512)
        for stream in (7, 8, 8):
            one.record_stream(block, stream)
        one.free(block)
        one.stream_done(8)
        one.process_events()
        assert one.awaiting == 512
        one.stream_done(7)
        one.process_events()
        assert one.awaiting == 0

    def test_its_own_stream_does_not_count(self) -> None:
        one = simulator()
        block = one.malloc(512, stream=3)
        one.record_stream(block, 3)
        one.free(block)
        assert one.awaiting == 0

    def test_work_put_on_the_stream_later_is_not_done(self) -> None:
        one = simulator()
        early, late = one.malloc(512), one.malloc(512)
        for block in (early, late):
            one.record_stream(block, 9)
        one.free(early)
        one.stream_done(9)
        one.free(late)
        one.process_events()
        assert one.awaiting == 512

    def test_a_flush_waits_for_all_streams(self) -> None:
        one = simulator(capacity=100 * MIB)
        block = one.malloc(60 * MIB)
        one.record_stream(block, 9)
        one.free(block)
        one.malloc(70 * MIB)
        assert (one.awaiting, one.retries, one.synchronizations) == (0, 1, 1)

    def test_a_recording_may_complete_a_free_itself(self) -> None:
        one = simulator()
        first, second = one.malloc(512), one.malloc(512)
        for block in (first, second):
            one.record_stream(block, 9)
            one.free(block)
        one.stream_done(9)
        one.complete(first)
        assert one.awaiting == 512
        one.process_events()
        assert one.awaiting == 0
        with pytest.raises(ValueError, match="awaits nothing"):
            one.complete(first)
        with pytest.raises(ValueError, match="not live"):
            one.record_stream(first, 9)


class TestPrivatePools:
    """CUDA graphs and `MemPool`."""

    def test_a_pool_keeps_its_memory_until_it_is_released(self) -> None:
        one = simulator()
        one.free(one.malloc(30 * MIB, pool=POOL))
        one.empty_cache()
        assert one.reserved == 30 * MIB
        one.release_pool(POOL)
        one.empty_cache()
        assert one.reserved == 0

    def test_a_capture_neither_flushes_nor_recycles(self) -> None:
        one = simulator(version="2.11", capacity=100 * MIB)
        one.free(one.malloc(60 * MIB))
        block = one.malloc(512)
        one.record_stream(block, 9)
        one.free(block)
        one.stream_done(9)
        one.malloc(20 * MIB, pool=POOL)
        assert one.awaiting == 512
        with pytest.raises(OutOfMemory):
            one.malloc(60 * MIB, pool=POOL)
        assert one.retries == 0
        one.malloc(512)
        assert one.awaiting == 0

    @pytest.mark.parametrize(("version", "flushes"), [("2.11", False), ("2.13", True)])
    def test_a_user_pool_flushes_since_torch_2_12(self, version: str, flushes: bool) -> None:
        one = simulator(version=version, capacity=100 * MIB)
        one.free(one.malloc(60 * MIB))
        if flushes:
            one.malloc(60 * MIB, pool=POOL)
        else:
            with pytest.raises(OutOfMemory):
                one.malloc(60 * MIB, pool=POOL)


def test_events_are_those_of_a_memory_history() -> None:
    events: list[AllocatorEvent] = []
    one = simulator(hook=events.append)
    block = one.malloc(1000, stream=5)
    one.record_stream(block, 6)
    one.free(block)
    one.synchronize()
    one.empty_cache()
    base = block.address
    assert events == [
        ("segment_alloc", base, 2 * MIB, 5, (0, 0)),
        ("alloc", base, 1000, 5, (0, 0)),
        ("free_requested", base, 1000, 5, (0, 0)),
        ("free_completed", base, 1000, 5, (0, 0)),
        ("segment_free", base, 2 * MIB, 5, (0, 0)),
    ]


def test_peaks_begin_again_where_one_is() -> None:
    one = simulator()
    kept = one.malloc(20 * MIB)
    one.free(one.malloc(40 * MIB))
    assert (one.peak_allocated, one.peak_reserved) == (60 * MIB, 60 * MIB)
    one.reset_peaks()
    assert (one.peak_allocated, one.peak_reserved) == (20 * MIB, 60 * MIB)
    assert isinstance(kept, SimBlock)
