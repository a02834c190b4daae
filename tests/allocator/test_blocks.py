"""Blocks, segments and arenas: what is free, in what order, and what becomes one."""

from __future__ import annotations

import pytest

from memtriage.allocator.blocks import (
    ALLOCATED,
    AWAITING,
    FREE,
    GONE,
    NEVER,
    UNMAPPED,
    Arena,
    SimPool,
    SimSegment,
    split_front,
)
from memtriage.allocator.settings import parse_conf

MIB = 1 << 20


def arena(
    conf: str = "", *, small: bool = False, splits: bool = True, expandable: bool = True, stream: int = 0
) -> Arena:
    pool = SimPool((0, 0), capturing=False, splits=splits, expandable=expandable)
    return Arena(pool, stream, small=small, settings=parse_conf(conf, "2.11"))


@pytest.mark.parametrize(
    ("conf", "options", "expected"),
    [
        # expandable, the least rest that is split off, requests that are not split, page
        ("", {}, (False, MIB + 1, NEVER, 20 * MIB)),
        ("", {"small": True}, (False, 512, NEVER, 2 * MIB)),
        ("", {"splits": False}, (False, NEVER, NEVER, 20 * MIB)),
        ("", {"splits": False, "small": True}, (False, NEVER, NEVER, 2 * MIB)),
        ("max_split_size_mb:32", {}, (False, MIB + 1, 32 * MIB, 20 * MIB)),
        ("max_split_size_mb:32", {"small": True}, (False, 512, NEVER, 2 * MIB)),
        ("expandable_segments:True", {}, (True, 512, NEVER, 20 * MIB)),
        ("expandable_segments:True", {"small": True}, (True, 512, NEVER, 2 * MIB)),
        ("expandable_segments:True", {"expandable": False}, (False, MIB + 1, NEVER, 20 * MIB)),
        ("expandable_segments:True,max_split_size_mb:32", {}, (True, 512, NEVER, 20 * MIB)),
        ("large_segment_size_mb:64", {}, (False, MIB + 1, NEVER, 64 * MIB)),
        ("large_segment_size_mb:64", {"small": True}, (False, 512, NEVER, 2 * MIB)),
    ],
)
def test_an_arena_follows_the_settings_and_its_pool(
    conf: str, options: dict[str, bool], expected: tuple[bool, int, int, int]
) -> None:
    one = arena(conf, **options)
    assert (one.expandable, one.least_rest, one.split_limit, one.page) == expected


def test_a_new_block_is_allocated_and_nobody_asked_for_it_yet() -> None:
    one = arena(stream=5)
    block = SimSegment(one, 1 << 40, 4096, 0, None).head
    assert (block.state, block.requested, block.streams, block.size) == (ALLOCATED, 0, None, 4096)
    assert len({ALLOCATED, FREE, AWAITING, UNMAPPED, GONE}) == 5
    assert (one.stream, one.pool.released, one.pool.searches, one.pool.capturing) == (5, False, 0, False)


def test_free_blocks_are_in_the_order_of_best_fit() -> None:
    one = arena()
    segments = [SimSegment(one, address, size, rank, None) for address, size, rank in [
        (900, 1024, 1 << 70), (500, 512, 9 << 70), (700, 512, 2 << 70), (100, 4096, 1),
    ]]  # fmt: skip
    one.pool.searches = 4
    for segment in segments:
        assert segment.head.state == ALLOCATED
        one.insert(segment.head)
    assert [block.address for block in one.blocks] == [700, 500, 900, 100]
    assert one.keys == sorted(one.keys) == [block.key for block in one.blocks]
    assert [(block.state, block.born) for block in one.blocks] == [(FREE, 4)] * 4
    one.remove(segments[1].head)
    one.remove(segments[3].head)
    assert [block.address for block in one.blocks] == [700, 900]
    assert len(one.keys) == 2


def test_unmapped_ranges_are_in_the_order_of_their_addresses() -> None:
    one = arena()
    for address, rank in [(900, 1), (500, 3), (700, 2)]:
        one.insert_unmapped(SimSegment(one, address, 512, rank, 512).head)
    assert [(block.address, block.state) for block in one.unmapped] == [
        (500, UNMAPPED), (700, UNMAPPED), (900, UNMAPPED),
    ]  # fmt: skip


def parts(segment: SimSegment) -> list[tuple[int, int]]:
    """Address and size of a segment's blocks, which are linked both ways."""
    blocks = list(segment)
    assert [block.prev for block in blocks] == [None, *blocks[:-1]]
    assert blocks[-1].next is None
    return [(block.address, block.size) for block in blocks]


def test_a_block_is_cut_at_its_front() -> None:
    segment = SimSegment(arena(), 1 << 40, 4096, 7, None)
    rest = segment.head
    assert rest.alone
    first = split_front(rest, 512)
    second = split_front(rest, 1024)
    assert list(segment) == [first, second, rest]
    assert parts(segment) == [(1 << 40, 512), ((1 << 40) + 512, 1024), ((1 << 40) + 1536, 2560)]
    assert [block.alone for block in segment] == [False] * 3
    assert [block.where for block in segment] == [7, 519, 1543]


@pytest.mark.parametrize("state", [FREE, UNMAPPED])
def test_neighbors_of_one_state_become_one_block(state: int) -> None:
    one = arena()
    segment = SimSegment(one, 1 << 40, 4096, 0, 512)
    rest = segment.head
    a, b, c, d = (split_front(rest, 512) for _ in range(4))
    insert = one.insert if state == FREE else one.insert_unmapped
    for block in (a, c):
        insert(block)
    b.state = state
    one.absorb(b, b.next)
    assert parts(segment) == [
        ((1 << 40) + at, size) for at, size in [(0, 512), (512, 1024), (1536, 512), (2048, 2048)]
    ]
    one.absorb(b, b.prev)
    assert (segment.head, b.prev, b.next) == (b, None, d)
    assert parts(segment) == [((1 << 40) + at, size) for at, size in [(0, 1536), (1536, 512), (2048, 2048)]]
    assert (a.state, c.state, b.state) == (GONE, GONE, state)
    assert (one.blocks, one.keys, one.unmapped) == ([], [], [])
    insert(rest)
    d.state = state
    one.absorb(d, rest)
    insert(b)
    one.absorb(d, b)
    assert parts(segment) == [(1 << 40, 4096)]
    assert d.alone
    assert segment.head is d


def test_a_block_takes_in_the_one_before_it_and_keeps_what_is_in_front() -> None:
    one = arena()
    segment = SimSegment(one, 1 << 40, 2048, 0, None)
    last = segment.head
    first, middle = split_front(last, 512), split_front(last, 1024)
    one.insert(middle)
    last.state = FREE
    one.absorb(last, middle)
    assert (list(segment), last.address, last.size) == ([first, last], (1 << 40) + 512, 1536)
    assert (first.next, last.prev, segment.head) == (last, first, first)


def test_blocks_of_two_states_stay_apart() -> None:
    one = arena()
    segment = SimSegment(one, 1 << 40, 1536, 0, 512)
    last = segment.head
    first, middle = split_front(last, 512), split_front(last, 512)
    one.insert(first)
    one.insert_unmapped(last)
    before = parts(segment)
    for other in (None, first, last):
        one.absorb(middle, other)
    assert (parts(segment), one.blocks, one.unmapped) == (before, [first], [last])
