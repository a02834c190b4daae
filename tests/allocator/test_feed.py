"""Recorded events on their way into a simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.allocator.recordings import (
    ALLOC,
    ASK,
    BASE,
    FREED,
    GONE,
    MIB,
    NEW,
    OOM,
    PRIVATE_POOL,
    UNMAP,
    segment_at,
    trace_of,
)

from memtriage.allocator.events import OutOfMemory
from memtriage.allocator.feed import Feed, PoolsByAddress
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator

OTHER_POOL = (1, 0)


@pytest.mark.parametrize(
    ("at", "index", "pool"),
    [
        (40, 4, PRIVATE_POOL),
        (59, 4, PRIVATE_POOL),
        (60, 4, (0, 0)),
        (39, 4, (0, 0)),
        (40, 3, (0, 0)),
        (40, 2, (0, 0)),
        (100, 0, OTHER_POOL),
        (119, 9, OTHER_POOL),
        (120, 9, (0, 0)),
        (0, 9, (0, 0)),
        (-1, 9, (0, 0)),
    ],
)
def test_a_pool_is_told_by_the_segment_that_is_there_in_the_end(
    at: int, index: int, pool: tuple[int, int]
) -> None:
    segments = [
        segment_at(100, "20", pool=OTHER_POOL), segment_at(0, "20"), segment_at(40, "20", pool=PRIVATE_POOL),
    ]  # fmt: skip
    trace = trace_of((ALLOC, 0, 5), (NEW, 40, 20), (ALLOC, 40, 5), (NEW, 40, 20))
    assert PoolsByAddress(trace, segments).of(BASE + at * MIB, index) == pool


@pytest.mark.parametrize("stream", [0, 7])
def test_allocations_and_frees_are_passed_on_in_their_order(stream: int) -> None:
    trace = trace_of(
        (ALLOC, 0, 5),
        (ALLOC, 10, 3),
        (ASK, 0, 5),
        (ALLOC, 20, 2),  # the free of the first is not complete: it awaits a stream
        (FREED, 0, 5),
        (ASK, 10, 3),
        (FREED, 10, 3),
        (FREED, 10, 3),
        (ASK, 99, 1),
        (FREED, 99, 1),
        (NEW, 200, 20),
        (FREED, 20, 2),
        (ALLOC, 30, 4),
        (ASK, 30, 4),
        (FREED, 40, 1),
        (FREED, 30, 4),
    )
    trace = replace(trace, stream=np.full(len(trace), stream))
    simulator = Simulator(parse_conf("", "2.11"))
    feed = Feed(simulator, trace, [])
    seen = []
    for index in range(len(trace)):
        block = feed.event(index)
        if block is not None:
            assert (block.requested, block.arena.stream) == (int(trace.size[index]), stream)
        seen.append(
            (
                block is not None,
                simulator.allocated // MIB,
                simulator.awaiting // MIB,
                [(address - BASE) // MIB for address in feed.live],
                [(address - BASE) // MIB for address in feed.waiting],
            )
        )
    assert seen == [
        (True, 5, 0, [0], []),
        (True, 8, 0, [0, 10], []),
        (False, 3, 5, [10], [0]),
        (True, 5, 5, [10, 20], [0]),
        (False, 5, 0, [10, 20], []),
        (False, 2, 0, [20], []),
        (False, 2, 0, [20], []),
        (False, 2, 0, [20], []),
        (False, 2, 0, [20], []),
        (False, 2, 0, [20], []),
        (False, 2, 0, [20], []),
        (False, 0, 0, [], []),
        (True, 4, 0, [30], []),
        (False, 0, 4, [], [30]),
        (False, 0, 4, [], [30]),
        (False, 0, 0, [], []),
    ]


def test_a_block_that_a_flush_has_recycled_is_not_completed_again() -> None:
    trace = trace_of((ALLOC, 0, 5), (ASK, 0, 5), (ALLOC, 10, 2), (FREED, 0, 5))
    simulator = Simulator(parse_conf("", "2.11"))
    feed = Feed(simulator, trace, [])
    for index in range(2):
        feed.event(index)
    assert simulator.awaiting == 5 * MIB
    simulator.synchronize()
    again = feed.event(2)
    feed.event(3)
    assert (simulator.allocated, simulator.awaiting, feed.waiting) == (2 * MIB, 0, {})
    assert again is feed.live[BASE + 10 * MIB]


def test_blocks_that_exist_already_can_be_freed() -> None:
    simulator = Simulator(parse_conf("", "2.11"))
    old = simulator.malloc(5 * MIB)
    feed = Feed(simulator, trace_of((ASK, 0, 5), (FREED, 0, 5)), [], {BASE: old})
    feed.event(0)
    assert (simulator.allocated, simulator.awaiting, feed.live) == (0, 0, {})


def test_the_pool_that_is_recorded_goes_before_the_one_that_is_inferred() -> None:
    simulator = Simulator(parse_conf("", "2.11"))
    trace = trace_of((ALLOC, 0, 5), (ALLOC, 5, 5), (ALLOC, 40, 5), pools={1: OTHER_POOL})
    feed = Feed(simulator, trace, [segment_at(0, "5 5 -10", pool=PRIVATE_POOL)])
    assert [feed.pool(index) for index in range(3)] == [PRIVATE_POOL, OTHER_POOL, (0, 0)]
    blocks = [feed.event(index) for index in range(3)]
    assert [block and block.arena.pool.id for block in blocks] == [PRIVATE_POOL, OTHER_POOL, (0, 0)]


@pytest.mark.parametrize(
    ("given_back", "released"),
    [
        ([(GONE, 0, 20)], True),
        ([(UNMAP, 0, 20)], True),
        ([(GONE, 300, 20), (GONE, 0, 20)], True),
        ([(GONE, -20, 21)], True),
        ([(GONE, -20, 20)], False),
        ([(GONE, 1, 20)], False),
        ([(GONE, 300, 20), (OOM, 0, 5), (GONE, 0, 20)], False),
        ([], False),
    ],
)
def test_a_private_pool_is_released_where_memory_of_it_is_given_back(
    given_back: list[tuple[str, int, int]], released: bool
) -> None:
    simulator = Simulator(parse_conf("", "2.11"))
    blocks = [(ALLOC, 0, 5), (ALLOC, 100, 30), (ASK, 0, 5), (FREED, 0, 5), (ASK, 100, 30), (FREED, 100, 30)]
    trace = trace_of(*blocks, *given_back, pools={0: PRIVATE_POOL})
    feed = Feed(simulator, trace, [])
    for index in range(len(blocks)):
        feed.event(index)
    assert simulator.reserved == 50 * MIB
    feed.empty_cache(len(blocks))
    assert simulator.reserved == (0 if released else 20 * MIB)


def test_what_ran_out_of_memory_is_asked_for_again_and_not_kept() -> None:
    simulator = Simulator(parse_conf("", "2.11"), capacity=40 * MIB)
    feed = Feed(simulator, trace_of((OOM, 0, 30), (OOM, 0, 50)), [])
    feed.try_to_allocate(0)
    assert (simulator.allocated, simulator.reserved) == (0, 30 * MIB)
    assert [segment.stream for segment in simulator.snapshot()] == [7]
    with pytest.raises(OutOfMemory):
        feed.try_to_allocate(1)
