"""A simulator in the state in which a recorded trace begins."""

from __future__ import annotations

import msgspec
import pytest
from tests.allocator.recordings import BASE, MIB, columns
from tests.allocator.simulators import layout

from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.feed import Feed
from memtriage.allocator.recorded_start import OldBlock, Ranges, Region, StartingState, starting_state
from memtriage.allocator.restore import restore
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.model.blocks import Segment

POOL = (1, 0)


def without_requests_of_awaiting(segments: tuple[Segment, ...]) -> list[Segment]:
    """Segments as a start knows them: what a block that awaits a stream was asked for is not recorded."""
    return [
        msgspec.structs.replace(
            segment,
            blocks=tuple(
                msgspec.structs.replace(block, requested=0) if block.state == "awaiting" else block
                for block in segment.blocks
            ),
        )
        for segment in segments
    ]


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_restored_simulator_is_as_the_recorded_one_was_and_does_the_same(conf: str) -> None:
    settings = parse_conf(conf, "2.11")
    events: list[AllocatorEvent] = []
    one = Simulator(settings, device_memory=1000 * MIB, hook=events.append)
    blocks = [
        one.malloc(int(size * MIB), stream, pool)
        for size, stream, pool in [
            (60, 0, (0, 0)), (0.25, 0, (0, 0)), (30, 0, POOL), (0.5, 0, (0, 0)), (12.5, 0, (0, 0)),
            (7, 9, (0, 0)), (0.75, 9, POOL), (4, 0, POOL), (44, 0, (0, 0)), (5, 0, (0, 0)),
        ]
    ]  # fmt: skip
    for block in blocks[:3]:
        one.free(block)
    one.empty_cache()
    one.record_stream(blocks[-1], 5)
    one.free(blocks[-1])
    counters = (one.allocated, one.awaiting, one.reserved, one.releasable)
    requested = one.requested - 5 * MIB
    truth, shape = without_requests_of_awaiting(one.snapshot()), sorted(layout(one))
    begun = len(events)
    later = [one.malloc(size * MIB, stream) for size, stream in [(50, 0), (3, 9), (6, 8), (1, 0)]]
    one.free(blocks[-2])
    one.free(later[0])
    one.malloc(20 * MIB)

    trace, end = columns(events[begun:]), list(one.snapshot())
    again = Simulator(settings, device_memory=1000 * MIB)
    live = restore(again, starting_state(trace, end, settings))
    assert without_requests_of_awaiting(again.snapshot()) == truth
    assert sorted(layout(again)) == shape
    assert (again.allocated, again.awaiting, again.reserved, again.releasable) == counters
    assert (again.requested, again.peak_allocated, again.peak_reserved) == (
        requested, again.allocated, again.reserved,
    )  # fmt: skip
    assert {address: block.address for address, block in live.items()} == {
        block.address: block.address
        for segment in truth
        for block in segment.blocks
        if block.state == "active"
    }
    feed = Feed(again, trace, end, live)
    for index in range(len(trace)):
        feed.event(index)
    assert sorted(layout(again)) == sorted(layout(one))


def test_mapped_regions_of_one_virtual_range_become_one_segment() -> None:
    pages = [
        (0, 40, 7, 20), (160, 20, 7, 20), (200, 20, 7, 20), (360, 20, 7, 20), (400, 20, 8, 20),
        (500, 4, 7, 2), (600, 20, 9, 20),
    ]  # fmt: skip
    regions = [
        Region(BASE + at * MIB, size * MIB, stream, (0, 0), page=page * MIB)
        for at, size, stream, page in pages
    ]
    mapped = Ranges((region.address, region.end) for region in regions[:-1])
    blocks = [
        OldBlock(BASE + at * MIB, size * MIB, size * MIB, 7, guessed=False)
        for at, size in [(0, 15), (25, 15), (200, 20), (501, 1)]
    ]
    start = StartingState(regions, mapped, blocks, occupied=[(BASE + 160 * MIB, 5 * MIB)])
    one = Simulator(parse_conf("expandable_segments:True", "2.11"), device_memory=160 * MIB)
    live = restore(one, start)
    assert layout(one) == [
        "15A 10F 15A 120U 5W 15F",
        "20A 140U 20F",
        "20F 160U",
        "1F 1A 2F 176U",
    ]
    assert [(segment.arena.stream, segment.page) for segment in one.backing.segments] == [
        (7, 20 * MIB), (7, 20 * MIB), (8, 20 * MIB), (7, 2 * MIB),
    ]  # fmt: skip
    assert [(address - BASE) // MIB for address in live] == [0, 25, 200, 501]
    assert (one.reserved, one.allocated, one.awaiting, one.requested) == (
        124 * MIB, 51 * MIB, 5 * MIB, 51 * MIB,
    )  # fmt: skip
