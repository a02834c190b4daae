"""Ranges of addresses."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.allocator.recordings import MIB, columns

from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.recorded_start import Ranges, starting_state
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
