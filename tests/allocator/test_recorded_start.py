"""Ranges of addresses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.allocator.recordings import ASK, BASE, FREED, MAP, MIB, UNMAP, columns, segment_at, trace_of

from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.recorded_start import (
    Ranges,
    StartingState,
    starting_state,
)
from memtriage.allocator.settings import AllocatorSettings
from memtriage.allocator.simulator import Simulator
from memtriage.model.blocks import Segment
from memtriage.model.recording import Action

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
    assert (start.undone, list(start.mapped)) == (0, [])


def test_a_segment_that_is_gone_without_being_freed_is_a_gap_in_the_trace() -> None:
    events: list[AllocatorEvent] = []
    simulator = Simulator(AllocatorSettings(), hook=events.append)
    simulator.malloc(30 * MIB)
    trace = columns(events)
    assert starting_state(trace, [], AllocatorSettings()).undone == 1
    assert starting_state(trace, simulator.snapshot(), AllocatorSettings()).pools == {0: (0, 0)}


def started(
    *events: tuple[Action, float, float], segments: list[Segment], limit: int | None = None
) -> StartingState:
    return starting_state(trace_of(*events), segments, AllocatorSettings(max_split_size=limit))


def test_a_mapped_part_of_a_range_is_undone() -> None:
    start = started((MAP, 4, 4), (UNMAP, 20, 2), segments=[segment_at(0, "-8", page=2 * MIB)])
    assert list(start.mapped) == [(BASE, BASE + 4 * MIB), (BASE + 20 * MIB, BASE + 22 * MIB)]
    assert [(region.address - BASE, region.size, region.page) for region in start.regions] == [
        (0, 8 * MIB, 2 * MIB), (20 * MIB, 2 * MIB, 2 * MIB),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("completed", "behind", "limit", "size", "guessed"),
    [
        pytest.param(False, 10, None, 10, False, id="slack up to the block behind it"),
        pytest.param(False, 10.5, None, 10.5, False, id="slack of a mebibyte"),
        pytest.param(False, 11, None, 9.5, True, id="more may have been free"),
        pytest.param(False, 11, 9 * MIB, 11, False, id="a block that is never split"),
        pytest.param(False, 11, 10 * MIB, 9.5, True, id="one that is too small for that"),
        pytest.param(False, 9.5, None, 9.5, False, id="no slack"),
        pytest.param(True, 9.5, None, 9.5, True, id="it may have been freed before"),
    ],
)
def test_the_size_of_a_freed_block_follows_from_what_is_behind_it(
    completed: bool, behind: float, limit: int | None, size: float, guessed: bool
) -> None:
    events = [(FREED, 0, 9.5)] if completed else [(ASK, 0, 9.5), (FREED, 0, 9.5)]
    left = segment_at(0, f"-{behind} 2 -{18 - behind}")
    old, other = started(*events, segments=[left], limit=limit).blocks
    assert (old.size, old.requested) == (int(size * MIB), int(9.5 * MIB))
    assert old.guessed is guessed
    assert (other.size, other.guessed) == (2 * MIB, False)


def test_the_next_freed_block_is_an_edge_too() -> None:
    first, second = started((ASK, 0, 9.5), (ASK, 10, 4), segments=[segment_at(0, "-20")]).blocks
    assert (first.size, second.size, second.guessed) == (10 * MIB, 4 * MIB, True)
