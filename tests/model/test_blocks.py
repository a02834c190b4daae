"""Blocks, segments and page-locked blocks: where they end, and how large they are."""

from __future__ import annotations

import pytest

from memtriage.model.blocks import DEFAULT_POOL, Block, Segment, pinned_block


def test_ranges_end_at_the_first_address_after_them() -> None:
    block = Block(address=512, size=1024, requested=1000, state="active")
    segment = Segment(
        device=0, address=512, size=4096, stream=0, pool=DEFAULT_POOL, expandable=False, blocks=(block,)
    )
    assert (block.end, segment.end) == (1536, 4608)


@pytest.mark.parametrize(
    ("asked", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192), ((1 << 30) + 1, 1 << 31)]
)
def test_a_page_locked_block_is_the_next_power_of_two(asked: int, taken: int) -> None:
    assert pinned_block(asked) == taken
