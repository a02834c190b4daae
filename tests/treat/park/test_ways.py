"""What cannot be parked, told by where it lies."""

from __future__ import annotations

import numpy as np
import pytest

from memtriage.allocator.settings import Settings
from memtriage.treat.compact.one_device import PRIVATE, REGISTERED
from memtriage.treat.compact.storages import GRAPH, NOT_OURS
from memtriage.treat.device.layout import layout_of_raw
from memtriage.treat.park.ways import spots_in

MIB = 1 << 20


def segment(address: int, pool: tuple[int, int] = (0, 0), **more: object) -> dict[str, object]:
    block = {"address": address, "size": 2 * MIB, "requested_size": MIB, "state": "active_allocated"}
    return {
        "device": 0,
        "address": address,
        "total_size": 2 * MIB,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": pool,
        "blocks": [block],
        **more,
    }


SEGMENTS = [
    segment(2 * MIB),
    segment(6 * MIB, (0, 3)),
    segment(10 * MIB, registration_counter=1),
]
ADDRESSES = np.array([2, 3, 7, 10, 1, 4, 100]) * MIB


@pytest.mark.parametrize("graphs", [False, True])
def test_private_pools_registered_and_foreign_memory_stay(graphs: bool) -> None:
    layout = layout_of_raw(SEGMENTS, 0, Settings())
    expected = [None, None, PRIVATE, REGISTERED, NOT_OURS, NOT_OURS, NOT_OURS]
    spots = spots_in(layout, ADDRESSES, graphs=graphs)
    assert [spot.reason for spot in spots] == expected
    assert [spot.stream for spot in spots[:2]] == [0, 0]


def test_a_captured_graph_may_have_any_address() -> None:
    layout = layout_of_raw([*SEGMENTS, segment(20 * MIB, (7, 0))], 0, Settings())
    refused = spots_in(layout, ADDRESSES, graphs=False)
    assert [spot.reason for spot in refused] == [GRAPH] * len(ADDRESSES)
    allowed = spots_in(layout, np.array([2, 20]) * MIB, graphs=True)
    assert [spot.reason for spot in allowed] == [None, PRIVATE]


def test_a_storage_comes_back_to_the_stream_that_it_is_of() -> None:
    layout = layout_of_raw([segment(2 * MIB), segment(6 * MIB, stream=77)], 0, Settings())
    spots = spots_in(layout, np.array([7, 2, 6]) * MIB, graphs=False)
    assert [spot.stream for spot in spots] == [77, 0, 77]
