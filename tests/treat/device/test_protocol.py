"""Layouts: the same from the dictionaries of a snapshot and from plain segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memtriage.allocator.settings import AllocatorSettings, parse_conf
from memtriage.model.blocks import Segment
from memtriage.model.units import MIB
from memtriage.observe.cuda import parse_segments
from memtriage.treat.device.protocol import DeviceLayout, layout_of_raw, layout_of_segments
from memtriage.treat.device.simulated import simulate
from support.compaction import fragmented

STATES = {"active": "active_allocated", "awaiting": "active_pending_free", "free": "inactive"}


def raw(segment: Segment) -> dict[str, Any]:
    small = segment.size <= 2 * MIB if segment.page is None else segment.page == 2 * MIB
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.size,
        "stream": segment.stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": segment.pool,
        "is_expandable": segment.expandable,
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": STATES[block.state],
                "frames": [],
            }
            for block in segment.blocks
        ],
    }


def same(one: DeviceLayout, other: DeviceLayout) -> bool:
    columns = ("first", "address", "size", "requested", "state")
    return one.places == other.places and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in columns
    )


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_raw_and_plain_segments_give_the_same(conf: str) -> None:
    world = fragmented([3000 * index for index in range(1, 900)], 4, conf)
    segments = world.device.simulator.snapshot()
    settings = world.device.simulator.settings
    dictionaries = [raw(segment) for segment in segments]
    found = layout_of_raw(dictionaries[::-1], 0, settings)
    assert same(found, layout_of_segments(segments, settings))
    assert same(found, layout_of_segments(parse_segments(dictionaries), settings))
    assert not layout_of_raw(dictionaries, 1, settings).places


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:24"])
def test_a_simulated_device_has_the_layout_it_was_made_from(conf: str) -> None:
    world = fragmented([3000 * index for index in range(1, 900)], 4, conf)
    layout = world.device.layout()
    twin, storages = simulate(layout, None)
    assert same(twin.layout(), layout)
    assert twin.use() == world.device.use()
    assert sorted(storages) == sorted(storage.data_ptr() for storage in world.storages)


def test_a_snapshot_is_of_the_moment_that_it_was_taken() -> None:
    world = fragmented([3000 * index for index in range(1, 900)], 4)
    before = world.device.layout()
    read = world.device.snapshot()
    world.free(world.storages[::2])
    world.device.empty_cache()
    assert same(read(), before)
    assert not same(world.device.layout(), before)


def test_a_segment_without_blocks_has_none() -> None:
    world = fragmented([3000, 9 * MIB], 1)
    dictionaries = [raw(segment) for segment in world.device.simulator.snapshot()]
    for empty in range(len(dictionaries)):
        some = [
            {**dictionary, "blocks": []} if at == empty else dictionary
            for at, dictionary in enumerate(dictionaries)
        ]
        layout = layout_of_raw(some, 0, AllocatorSettings())
        assert layout.first.tolist()[-1] == len(layout.address) == len(layout.state)
        assert np.diff(layout.first).tolist() == [len(segment["blocks"]) for segment in some]
        assert set(layout.address.tolist()) == {
            block["address"] for segment in some for block in segment["blocks"]
        }


def test_a_registered_segment_is_known() -> None:
    world = fragmented([3000], 1)
    (one,) = [raw(segment) for segment in world.device.simulator.snapshot()]
    (plain,) = layout_of_raw([one], 0, AllocatorSettings()).places
    (registered,) = layout_of_raw([{**one, "registration_counter": 0}], 0, AllocatorSettings()).places
    assert (plain.registered, registered.registered) == (False, True)


def test_needs_leave_out_what_a_block_kept_beyond_its_request() -> None:
    for conf in ("", "roundup_power2_divisions:4"):
        settings = parse_conf(conf, "2.11.0")
        world = fragmented([5 * MIB + 3, 100, 70_001], 1, conf)
        layout = world.device.layout()
        used = np.flatnonzero(layout.state)
        expected = [settings.round_size(size) for size in layout.requested[used].tolist()]
        assert layout.needs_of(used).tolist() == expected
