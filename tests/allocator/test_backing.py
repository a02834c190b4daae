"""What the allocator asks of the driver, and when it gives memory back."""

from __future__ import annotations

import pytest
from tests.allocator.simulators import MIB, SegmentLog, layout, simulator

from memtriage.allocator.events import AllocatorEvent, OutOfMemory


@pytest.mark.parametrize(("version", "first"), [("2.12", False), ("2.13", True)])
def test_ties_go_by_address_before_torch_2_13_and_by_age_since(version: str, first: bool) -> None:
    one = simulator(version=version)
    older, newer = one.malloc(30 * MIB), one.malloc(30 * MIB)
    expected = (older if first else newer).address
    assert newer.address < older.address
    one.free(older)
    one.free(newer)
    assert one.malloc(30 * MIB).address == expected


@pytest.mark.parametrize("sizes", [(30, 40, 50), (50, 40, 30)])
def test_of_three_equal_blocks_the_oldest_is_taken(sizes: tuple[int, int, int]) -> None:
    one = simulator(version="2.13")
    for size in (*sizes, 30):
        one.free(one.malloc(size * MIB))
        held = [one.malloc(size * MIB) for size in sizes]
        for block in held:
            one.free(block)
    order = [segment.size for segment in one.backing.segments]
    ranks = [segment.rank for segment in one.backing.segments]
    assert (order, ranks) == ([size * MIB for size in sizes], [0, 1 << 48, 2 << 48])


@pytest.mark.parametrize(("conf", "page"), [("", None), ("expandable_segments:True", 20 * MIB)])
def test_a_segment_that_was_there_before_can_be_made_again(conf: str, page: int | None) -> None:
    events: list[AllocatorEvent] = []
    one = simulator(conf, capacity=100 * MIB, hook=events.append)
    arena = one.arena((0, 0), 7, small=False)
    segment = one.backing.again(arena, 60 * MIB, page)
    assert (segment.size, segment.page, segment.arena) == (60 * MIB, page, arena)
    assert list(one.backing.segments) == [segment]
    assert one.reserved == (60 * MIB if page is None else 0)
    if page is not None:
        one.backing.map_again(40 * MIB)
        one.backing.map_again(20 * MIB)
        assert one.reserved == 60 * MIB
    assert events == []
    with pytest.raises(OutOfMemory):
        one.malloc(60 * MIB)
    one.malloc(40 * MIB)


@pytest.mark.parametrize(
    ("memory", "size"),
    [(None, (1 << 40) // 8 * 9), (160 * MIB, 180 * MIB), (161 * MIB, 200 * MIB), (320 * MIB, 360 * MIB)],
)
def test_a_virtual_range_is_nine_eighths_of_the_device_in_whole_pages(memory: int | None, size: int) -> None:
    one = simulator("expandable_segments:True", device_memory=memory)
    one.malloc(30 * MIB)
    (segment,) = one.backing.segments
    assert segment.size == -(-size // (20 * MIB)) * 20 * MIB


# --- limits -------------------------------------------------------------------------------------------------


def test_a_fraction_of_the_device_is_a_limit() -> None:
    one = simulator("per_process_memory_fraction:0.5", device_memory=100 * MIB)
    one.malloc(50 * MIB)
    with pytest.raises(OutOfMemory):
        one.malloc(1)
    with pytest.raises(ValueError, match="needs the device's memory"):
        simulator("per_process_memory_fraction:0.5")


def test_throwing_early_spares_the_cache() -> None:
    conf = "throw_on_cudamalloc_oom:True"
    one = simulator(conf, "2.12", capacity=100 * MIB)
    one.free(one.malloc(60 * MIB))
    with pytest.raises(OutOfMemory):
        one.malloc(70 * MIB)
    assert (one.reserved, one.retries) == (60 * MIB, 0)


def test_but_a_limit_of_the_process_does_not() -> None:
    conf = "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5"
    one = simulator(conf, "2.12", device_memory=100 * MIB)
    one.free(one.malloc(40 * MIB))
    with pytest.raises(OutOfMemory):
        one.malloc(70 * MIB)
    assert (one.reserved, one.retries) == (0, 1)


def test_a_segment_that_is_full_is_followed_by_another() -> None:
    one = simulator("expandable_segments:True", capacity=100 * MIB, device_memory=40 * MIB)
    one.malloc(50 * MIB)  # Of a virtual range of 60 MiB: 9/8 of 40 MiB in whole pages.
    one.malloc(20 * MIB)
    assert len(one.backing.segments) == 2
    assert one.reserved == 80 * MIB


def test_empty_cache_keeps_what_is_split() -> None:
    one = simulator()
    kept, gone = one.malloc(4 * MIB), one.malloc(30 * MIB)
    one.free(gone)
    assert (one.releasable, one.stranded) == (30 * MIB, 16 * MIB)
    one.empty_cache()
    assert (one.reserved, one.releasable, one.stranded) == (20 * MIB, 0, 16 * MIB)
    one.free(kept)
    one.empty_cache()
    assert one.reserved == 0


def test_a_limit_may_be_met_exactly_and_goes_before_a_fraction() -> None:
    one = simulator("per_process_memory_fraction:0.1", device_memory=100 * MIB, limit=60 * MIB)
    one.malloc(60 * MIB)
    with pytest.raises(OutOfMemory):
        one.malloc(512)
    assert (one.ooms, one.retries, one.reserved) == (1, 1, 60 * MIB)


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_an_emptied_cache_gives_back_the_large_first_and_streams_in_order(conf: str) -> None:
    events: list[AllocatorEvent] = []
    one = simulator(conf, device_memory=160 * MIB, hook=events.append)
    kept = [one.malloc(20 * MIB, stream=stream) for stream in (5, 3)]
    blocks = [
        one.malloc(size, stream=stream)
        for stream, size in [(5, 512), (5, 60 * MIB), (3, 512), (3, 40 * MIB), (5, 40 * MIB)]
    ]
    for block in blocks:
        one.free(block)
    del events[:]
    one.empty_cache()
    action = "segment_unmap" if conf else "segment_free"
    sizes = [(3, 40), (5, 100), (3, 2), (5, 2)] if conf else [(3, 40), (5, 40), (5, 60), (3, 2), (5, 2)]
    assert [(event.action, event.stream, event.size // MIB) for event in events] == [
        (action, stream, size) for stream, size in sizes
    ]
    assert layout(one) == ["20A 160U", "20A 160U"] if conf else ["20A", "20A"]
    assert [block.size for block in kept] == [20 * MIB] * 2


# --- `max_split_size_mb`: oversized blocks under pressure ---------------------------------------------------


def test_one_oversized_block_is_released_before_the_whole_cache() -> None:
    log = SegmentLog()
    one = simulator("max_split_size_mb:64", capacity=400 * MIB, hook=log)
    for block in [one.malloc(size * MIB) for size in (70, 80, 200, 40)]:
        one.free(block)
    one.malloc(140 * MIB)
    assert log[4:] == [("segment_free", 200 * MIB), ("segment_alloc", 140 * MIB)]
    assert one.retries == 0


def test_or_several_of_them_the_largest_first() -> None:
    log = SegmentLog()
    one = simulator("max_split_size_mb:64", capacity=300 * MIB, hook=log)
    for block in [one.malloc(size * MIB) for size in (70, 80, 90, 40)]:
        one.free(block)
    one.malloc(160 * MIB)
    assert log[4:] == [
        ("segment_free", 90 * MIB),
        ("segment_free", 80 * MIB),
        ("segment_alloc", 160 * MIB),
    ]


def test_oversized_blocks_on_other_streams_stay() -> None:
    log = SegmentLog()
    one = simulator("max_split_size_mb:64", capacity=300 * MIB, hook=log)
    for stream, size in [(3, 100), (0, 90), (0, 70)]:
        one.free(one.malloc(size * MIB, stream=stream))
    one.malloc(160 * MIB)
    assert log[3:] == [("segment_free", 90 * MIB), ("segment_free", 70 * MIB), ("segment_alloc", 160 * MIB)]
    assert one.retries == 0


def test_where_oversized_blocks_are_not_enough_the_whole_cache_goes_too() -> None:
    log = SegmentLog()
    one = simulator("max_split_size_mb:64", capacity=200 * MIB, hook=log)
    for size in (80, 40, 60):
        one.free(one.malloc(size * MIB))
    one.malloc(150 * MIB)
    assert log[3:] == [
        ("segment_free", 80 * MIB),
        ("segment_free", 40 * MIB),
        ("segment_free", 60 * MIB),
        ("segment_alloc", 150 * MIB),
    ]
    assert one.retries == 1


@pytest.mark.parametrize(
    ("options", "asked", "last"),
    [({"limit": 200 * MIB}, 100, "segment_map"), ({"capacity": 200 * MIB}, 210, "oom")],
)
def test_pages_of_expandable_segments_are_no_oversized_blocks(
    options: dict[str, int], asked: int, last: str
) -> None:
    log = SegmentLog()
    conf = "expandable_segments:True,max_split_size_mb:64"
    one = simulator(conf, **options, device_memory=320 * MIB, hook=log)
    one.malloc(20 * MIB)
    one.free(one.malloc(140 * MIB))
    if last == "oom":
        with pytest.raises(OutOfMemory):
            one.malloc(asked * MIB)
    else:
        one.malloc(asked * MIB)
    assert [action for action, _ in log[-2:]] == ["segment_unmap", last]
    assert (one.retries, one.ooms) == (1, last == "oom")


# --- `garbage_collection_threshold` -------------------------------------------------------------------------


def test_old_blocks_go_before_more_is_reserved() -> None:
    log = SegmentLog()
    one = simulator("garbage_collection_threshold:0.5", limit=200 * MIB, hook=log)
    old, young = one.malloc(60 * MIB), one.malloc(50 * MIB)
    one.free(old)
    for _ in range(3):
        one.free(one.malloc(30 * MIB, stream=4))
    one.free(young)
    one.malloc(20 * MIB, stream=3)
    assert ("segment_free", 60 * MIB) in log
    assert ("segment_free", 50 * MIB) not in log
    assert one.retries == 0


def test_small_allocations_make_no_large_block_older() -> None:
    log = SegmentLog()
    one = simulator("garbage_collection_threshold:0.5", limit=200 * MIB, hook=log)
    one.free(one.malloc(512))
    first, second = one.malloc(60 * MIB), one.malloc(50 * MIB)
    one.free(first)
    for _ in range(3):
        one.free(one.malloc(512))
    one.free(second)
    one.malloc(20 * MIB, stream=3)
    assert [size for action, size in log if action == "segment_free"] == [50 * MIB, 60 * MIB]


def test_a_segment_that_is_in_use_stays() -> None:
    log = SegmentLog()
    one = simulator("garbage_collection_threshold:0.5", limit=200 * MIB, hook=log)
    front, _, _ = one.malloc(5 * MIB), one.malloc(5 * MIB), one.malloc(90 * MIB)
    one.free(front)
    one.malloc(30 * MIB, stream=3)
    assert "segment_free" not in dict(log)


def test_nothing_happens_below_the_threshold_or_without_a_limit() -> None:
    for options in ({"limit": 1024 * MIB}, {}):
        one = simulator("garbage_collection_threshold:0.9", **options)
        one.free(one.malloc(60 * MIB))
        one.malloc(100 * MIB)
        assert one.reserved == 160 * MIB
