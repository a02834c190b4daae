"""Expandable segments: pages mapped and unmapped in a virtual range."""

from __future__ import annotations

import pytest
from tests.allocator.simulators import MIB, SegmentLog, layout, simulator

from memtriage.allocator.events import AllocatorEvent, OutOfMemory


def test_one_segment_grows_by_whole_pages() -> None:
    log = SegmentLog()
    one = simulator("expandable_segments:True", hook=log)
    first = one.malloc(5 * MIB)
    second = one.malloc(50 * MIB)
    assert second.address == first.address + 5 * MIB
    one.malloc(512)
    assert log == [("segment_map", 20 * MIB), ("segment_map", 40 * MIB), ("segment_map", 2 * MIB)]
    assert (one.reserved, one.allocated) == (62 * MIB, 55 * MIB + 512)
    large, small = sorted(one.snapshot(), key=lambda segment: -segment.size)
    assert (large.expandable, large.page, large.size) == (True, 20 * MIB, 60 * MIB)
    assert (small.expandable, small.page, small.size) == (True, 2 * MIB, 2 * MIB)


def test_blocks_are_split_to_the_byte() -> None:
    one = simulator("expandable_segments:True")
    assert one.malloc(19 * MIB + MIB // 2).size == 19 * MIB + MIB // 2


def test_wholly_free_pages_go_back_and_the_gap_is_filled_first() -> None:
    log = SegmentLog()
    one = simulator("expandable_segments:True", hook=log)
    a, b, c = one.malloc(30 * MIB), one.malloc(40 * MIB), one.malloc(10 * MIB)
    assert one.reserved == 80 * MIB
    one.free(b)
    assert (one.releasable, one.stranded) == (20 * MIB, 20 * MIB)
    one.empty_cache()
    assert log[-1] == ("segment_unmap", 20 * MIB)
    assert one.reserved == 60 * MIB
    assert [segment.size for segment in one.snapshot()] == [40 * MIB, 20 * MIB]
    again = one.malloc(35 * MIB)
    assert again.address == a.address + a.size
    assert log[-1] == ("segment_map", 20 * MIB)
    assert c.address == a.address + 70 * MIB


def test_everything_goes_back_with_its_virtual_range() -> None:
    one = simulator("expandable_segments:True")
    blocks = [one.malloc(size) for size in (512, 5 * MIB, 70 * MIB)]
    for block in blocks:
        one.free(block)
    one.empty_cache()
    assert (one.reserved, list(one.blocks())) == (0, [])


def test_best_fit_spares_the_end_that_can_grow() -> None:
    one = simulator("expandable_segments:True")
    hole = one.malloc(30 * MIB)
    start = hole.address
    one.malloc(5 * MIB)
    assert one.reserved == 40 * MIB  # 5 MiB are free at the end: the better fit, but for its growth.
    one.free(hole)
    assert one.malloc(4 * MIB).address == start


def test_of_equal_holes_the_lower_one_is_taken() -> None:
    one = simulator("expandable_segments:True")
    blocks = [one.malloc(6 * MIB) for _ in range(5)]
    lower = blocks[1].address
    one.free(blocks[3])
    one.free(blocks[1])
    assert one.malloc(6 * MIB).address == lower


def test_pages_are_unmapped_under_pressure() -> None:
    one = simulator("expandable_segments:True", capacity=100 * MIB)
    other = one.malloc(60 * MIB, stream=1)
    one.free(other)
    one.malloc(80 * MIB)
    assert (one.retries, one.reserved) == (1, 80 * MIB)
    with pytest.raises(OutOfMemory):
        one.malloc(40 * MIB)
    assert one.allocated == 80 * MIB


def test_what_was_mapped_before_memory_ran_out_stays_mapped() -> None:
    one = simulator("expandable_segments:True", capacity=100 * MIB)
    blocks = [one.malloc(20 * MIB) for _ in range(4)]
    one.free(blocks[1])
    with pytest.raises(OutOfMemory):
        one.malloc(41 * MIB)
    assert one.reserved == 60 * MIB
    one.malloc(40 * MIB)
    assert one.reserved == 100 * MIB


def test_pages_are_mapped_at_the_lowest_place_that_has_room() -> None:
    one = simulator("expandable_segments:True", device_memory=160 * MIB)
    a = one.malloc(30 * MIB)
    assert layout(one) == ["30A 10F 140U"]
    b = one.malloc(35 * MIB)
    assert layout(one) == ["30A 35A 15F 100U"]
    one.free(a)
    assert (one.releasable, one.stranded) == (20 * MIB, 25 * MIB)
    one.empty_cache()
    assert layout(one) == ["20U 10F 35A 15F 100U"]
    assert (one.reserved, one.releasable, one.stranded) == (60 * MIB, 0, 25 * MIB)
    c = one.malloc(31 * MIB)
    assert layout(one) == ["20U 10F 35A 31A 4F 80U"]
    d = one.malloc(30 * MIB)
    assert layout(one) == ["30A 35A 31A 4F 80U"]
    for block in (b, c):
        one.free(block)
    one.empty_cache()
    assert layout(one) == ["30A 10F 140U"]
    one.free(d)
    one.empty_cache()
    assert (layout(one), one.reserved, one.backing.segments) == ([], 0, {})


def test_whole_pages_go_from_the_middle_of_a_free_block() -> None:
    events: list[AllocatorEvent] = []
    one = simulator("expandable_segments:True", device_memory=160 * MIB, hook=events.append)
    first, middle, _ = (one.malloc(size * MIB) for size in (10, 45, 5))
    one.free(middle)
    one.empty_cache()
    assert layout(one) == ["10A 10F 20U 15F 5A 120U"]
    assert events[-1] == ("segment_unmap", first.address + 20 * MIB, 20 * MIB, 0, (0, 0))


def test_only_unmapped_space_behind_a_free_block_makes_it_larger() -> None:
    one = simulator("expandable_segments:True")
    fits, _, larger, _ = (one.malloc(size * MIB) for size in (6, 50, 8, 2))
    start = fits.address
    one.free(fits)
    one.free(larger)
    assert one.malloc(4 * MIB).address == start
