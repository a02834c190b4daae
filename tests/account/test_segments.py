"""What segments consist of, worked out by hand on a few blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.account.segments import (
    SegmentTotals,
    releasable_in,
    segment_totals,
    stranded_in,
    stranded_segments,
    whole_pages,
)
from memtriage.model.blocks import Block, BlockState, Segment

BASE = 1000


def segment(
    *blocks: tuple[int, BlockState], page: int | None = None, pool: int = 0, at: int = BASE
) -> Segment:
    """Blocks of so many bytes; of each that is in use one byte was not asked for."""
    made, address = [], at
    for size, state in blocks:
        requested = 0 if state == "free" else size - 1
        made.append(Block(address=address, size=size, requested=requested, state=state))
        address += size
    return Segment(
        device=0, address=at, size=address - at, stream=0, pool=(0, pool), expandable=page is not None,
        blocks=tuple(made), page=page,
    )  # fmt: skip


def test_every_byte_of_segments_has_one_use() -> None:
    totals = segment_totals(
        [
            segment((10, "active"), (5, "awaiting"), (25, "free")),
            segment((20, "free")),
            segment((7, "active"), (13, "free"), page=4, pool=3),
        ]
    )
    assert totals == SegmentTotals(
        reserved=80,
        requested=9 + 6,
        rounding=2,
        awaiting=5,
        releasable=20 + 12,  # a whole segment, and three pages from its ninth byte on
        stranded=25 + 1,
        private_pools=20,
    )
    assert totals.allocated == 17
    assert segment_totals([]).reserved == 0


@pytest.mark.parametrize(
    ("one", "releasable"),
    [
        pytest.param(segment((8, "free"), (8, "free")), 16, id="wholly free"),
        pytest.param(segment((8, "free"), (8, "active")), 0, id="with a live block"),
        pytest.param(segment((8, "free"), (8, "awaiting")), 0, id="with one that awaits a stream"),
        pytest.param(segment((8, "free"), pool=2), 8, id="of a private pool"),
        pytest.param(segment((3, "active"), (9, "free"), page=4), 8, id="whole pages"),
        pytest.param(segment((1, "active"), (5, "free"), (2, "active"), page=4), 0, id="parts of two pages"),
        pytest.param(segment((6, "free"), page=4), 6, id="wholly free, not in whole pages"),
    ],
)
def test_what_can_go_back_to_the_driver(one: Segment, releasable: int) -> None:
    free = sum(block.size for block in one.blocks if block.state == "free")
    assert (releasable_in(one), stranded_in(one)) == (releasable, free - releasable)


def test_pages_count_from_the_first_byte_of_the_segment() -> None:
    one = segment((3, "active"), (9, "free"), (2, "free"), page=4)
    _, free, rest = one.blocks
    assert whole_pages(free, one) == (BASE + 4, BASE + 12)
    assert whole_pages(rest, one) == (rest.address, rest.address)
    assert whole_pages(free, segment((3, "active"), (9, "free"))) == (free.address, free.address)


def test_the_worst_segment_comes_first_with_its_largest_pin() -> None:
    some = segment((2, "active"), (5, "free"), (4, "awaiting"), (2, "active"))
    worse = segment((2, "active"), (9, "free"), at=5000)
    as_bad = segment((2, "active"), (9, "free"), at=3000)
    found = stranded_segments([some, worse, segment((9, "free"), at=7000), as_bad])
    assert [(each.segment.address, each.stranded) for each in found] == [(3000, 9), (5000, 9), (BASE, 5)]
    assert [pin.address for pin in found[-1].pins] == [BASE + 7, BASE, BASE + 11]


states = st.sampled_from(["active", "awaiting", "free"])


@given(st.lists(st.tuples(st.integers(1, 9), states), min_size=1, max_size=12), st.none() | st.integers(1, 5))
def test_the_parts_of_a_segment_sum_to_it(blocks: list[tuple[int, BlockState]], page: int | None) -> None:
    one = segment(*blocks, page=page)
    totals = segment_totals([one])
    assert totals.reserved == totals.allocated + totals.awaiting + totals.releasable + totals.stranded
    assert sum(each.stranded for each in stranded_segments([one])) == totals.stranded >= 0
