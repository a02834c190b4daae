"""A private pool that is put back into an earlier state."""

from __future__ import annotations

import pytest
from tests.allocator.simulators import MIB, POOL, layout, simulator

from memtriage.allocator.checkpoints import checkpoint, restore


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_blocks_are_again_where_they_were(conf: str) -> None:
    one = simulator(conf)
    blocks = [one.malloc(size * MIB, pool=POOL) for size in (3, 5, 2, 30)]
    one.free(blocks[1])
    before, addresses = layout(one), [blocks[place].address for place in (0, 2, 3)]
    kept, allocated = checkpoint(one, POOL), one.allocated
    for place in (0, 2, 3):
        one.free(blocks[place])
    later = one.malloc(9 * MIB, pool=POOL)
    assert later.address in addresses  # Another graph has used the memory meanwhile.
    one.free(later)
    live = restore(one, kept)
    assert sorted(live) == sorted(addresses)
    assert (layout(one), one.allocated) == (before, allocated)
    for block in live.values():
        one.free(block)
    assert one.allocated == 0


def test_a_segment_from_after_the_checkpoint_stays_free() -> None:
    one = simulator()
    first = one.malloc(30 * MIB, pool=POOL)
    kept = checkpoint(one, POOL)
    second = one.malloc(40 * MIB, pool=POOL)
    one.free(first)
    one.free(second)
    restore(one, kept)
    assert (one.allocated, one.reserved) == (30 * MIB, 70 * MIB)
    assert one.malloc(40 * MIB, pool=POOL).address == second.address


def test_a_whole_segment_is_allocated_for_a_moment() -> None:
    """As torch does it: `setSegmentStateToCheckpoint` allocates all blocks and frees those that were free."""
    one = simulator()
    block = one.malloc(12 * MIB, pool=POOL)
    other = one.malloc(8 * MIB, pool=POOL)
    one.free(block)
    kept = checkpoint(one, POOL)
    one.free(other)
    one.reset_peaks()
    restore(one, kept)
    segment = 12 * MIB
    assert one.allocated == 8 * MIB
    assert one.peak_allocated >= one.allocated + segment - 8 * MIB


def test_a_pool_with_live_blocks_is_not_put_back() -> None:
    one = simulator()
    one.malloc(12 * MIB, pool=POOL)
    kept = checkpoint(one, POOL)
    with pytest.raises(ValueError, match="live"):
        restore(one, kept)


def test_other_pools_stay_as_they_are() -> None:
    one = simulator()
    outside = one.malloc(12 * MIB)
    inside = one.malloc(12 * MIB, pool=POOL)
    kept = checkpoint(one, POOL)
    one.free(inside)
    restore(one, kept)
    assert one.allocated == 24 * MIB
    one.free(outside)
    assert one.allocated == 12 * MIB
