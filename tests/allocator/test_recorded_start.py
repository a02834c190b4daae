"""Ranges of addresses."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.allocator.recordings import MIB, columns

from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.recorded_start import (
    ALWAYS_SPLIT,
    Ranges,
    Region,
    StartingState,
    keeps_at_most,
    starting_state,
)
from memtriage.allocator.settings import AllocatorSettings
from memtriage.allocator.simulator import Simulator

CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 12)), max_size=40)


@given(CHANGES)
def test_ranges_are_a_set_of_addresses_in_order_and_apart(changes: list[tuple[bool, int, int]]) -> None:
    ranges, truth = Ranges(), set[int]()
    for adds, start, length in changes:
        if adds:
            ranges.add(start, start + length)
            truth |= set(range(start, start + length))
        else:
            ranges.remove(start, start + length)
            truth -= set(range(start, start + length))
    listed = list(ranges)
    assert {address for start, end in listed for address in range(start, end)} == truth
    assert all(start < end for start, end in listed)
    assert all(end < start for (_, end), (start, _) in pairwise(listed))


def test_what_begins_in_a_part_is_found() -> None:
    ranges = Ranges([(0, 4), (8, 12), (20, 30)])
    assert ranges.within(4, 20) == [(8, 12)]
    assert ranges.within(0, 21) == [(0, 4), (8, 12), (20, 30)]


def test_segments_and_blocks_of_the_start_are_found_again() -> None:
    """What a recording began with, from its events and from what was left at its end."""
    events: list[AllocatorEvent] = []
    simulator = Simulator(AllocatorSettings(), hook=events.append)
    leaves, stays = simulator.malloc(30 * MIB), simulator.malloc(30 * MIB)
    segments = {segment.address for segment in simulator.snapshot()}
    events.clear()
    simulator.free(leaves)
    simulator.empty_cache()
    simulator.malloc(50 * MIB)
    start = starting_state(columns(events), simulator.snapshot(), AllocatorSettings())
    assert {region.address for region in start.regions} == segments
    assert {block.address for block in start.blocks} == {leaves.address, stays.address}
    assert start.undone == 0


def test_ranges_that_touch_are_one() -> None:
    assert list(Ranges([(0, 4), (4, 8), (9, 10)])) == [(0, 8), (9, 10)]
    ranges = Ranges([(0, 10)])
    ranges.remove(4, 6)
    assert list(ranges) == [(0, 4), (6, 10)]
    ranges.remove(10, 12)
    assert list(ranges) == [(0, 4), (6, 10)]


def test_small_segments_always_split_and_large_ones_keep_up_to_a_mebibyte() -> None:
    assert [keeps_at_most(size) for size in (2 * MIB, 2 * MIB + 1, 20 * MIB)] == [ALWAYS_SPLIT, MIB, MIB]
    assert Region(100, 20, 0, (0, 0), 0, 0).end == 120


def late(events: list[AllocatorEvent], simulator: Simulator) -> StartingState:
    return starting_state(columns(events), simulator.snapshot(), AllocatorSettings())


def test_a_freed_block_has_what_it_did_not_split_off() -> None:
    events: list[AllocatorEvent] = []
    simulator = Simulator(AllocatorSettings(), hook=events.append)
    whole = simulator.malloc(20 * MIB)
    simulator.free(whole)
    block = simulator.malloc(19 * MIB + 512)  # the rest is less than 1 MiB, and stays with it
    small = simulator.malloc(1000)
    events.clear()
    simulator.free(block)
    simulator.free(small)
    start = late(events, simulator)
    sizes = {old.requested: (old.size, old.alive, old.guessed) for old in start.blocks}
    assert sizes == {19 * MIB + 512: (20 * MIB, False, False), 1000: (1024, False, False)}


def test_segments_that_come_and_go_within_the_trace_were_not_there() -> None:
    events: list[AllocatorEvent] = []
    simulator = Simulator(AllocatorSettings(), hook=events.append)
    stays = simulator.malloc(30 * MIB)
    events.clear()
    simulator.free(simulator.malloc(50 * MIB))
    simulator.empty_cache()
    start = late(events, simulator)
    assert [region.address for region in start.regions] == [stays.address]
    assert start.undone == 0 and start.occupied == []


def test_a_segment_that_is_gone_without_being_freed_is_a_gap_in_the_trace() -> None:
    events: list[AllocatorEvent] = []
    simulator = Simulator(AllocatorSettings(), hook=events.append)
    simulator.malloc(30 * MIB)
    trace = columns(events)
    assert starting_state(trace, [], AllocatorSettings()).undone == 1
    assert starting_state(trace, simulator.snapshot(), AllocatorSettings()).pools == {0: (0, 0)}


def test_virtual_ranges_have_the_pages_of_their_segments() -> None:
    settings = AllocatorSettings(expandable_segments=True)
    events: list[AllocatorEvent] = []
    simulator = Simulator(settings, hook=events.append)
    large, small = simulator.malloc(30 * MIB), simulator.malloc(1000)
    simulator.free(large)
    simulator.free(small)
    simulator.empty_cache()
    start = starting_state(columns(events), simulator.snapshot(), settings)
    assert sorted((region.page // MIB, region.keeps) for region in start.regions) == [(2, 0), (20, 0)]
    assert list(start.mapped) == []
