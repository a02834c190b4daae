"""What cannot be parked, told by where it lies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch

import memtriage
from memtriage.allocator.settings import AllocatorSettings
from memtriage.observe import cuda
from memtriage.treat.compaction.one_device import PRIVATE, REGISTERED
from memtriage.treat.compaction.storages import FIXED, GRAPH, NOT_OURS, StorageFinder
from memtriage.treat.device.cuda import CudaDevice
from memtriage.treat.device.protocol import DeviceLayout, layout_of_raw
from memtriage.treat.parking import device
from memtriage.treat.parking.device import CudaWays, spots_in

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
    layout = layout_of_raw(SEGMENTS, 0, AllocatorSettings())
    expected = [None, None, PRIVATE, REGISTERED, NOT_OURS, NOT_OURS, NOT_OURS]
    spots = spots_in(layout, ADDRESSES, graphs=graphs)
    assert [spot.reason for spot in spots] == expected
    assert [spot.stream for spot in spots[:2]] == [0, 0]


def test_a_pool_that_nobody_allocates_from_any_more_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of_raw(SEGMENTS, 0, AllocatorSettings())
    monkeypatch.setattr(device, "DROPPED", {(0, 3)})
    assert [spot.reason for spot in spots_in(layout, ADDRESSES[:3], graphs=False)] == [None] * 3


def test_a_captured_graph_may_have_any_address() -> None:
    layout = layout_of_raw([*SEGMENTS, segment(20 * MIB, (7, 0))], 0, AllocatorSettings())
    refused = spots_in(layout, ADDRESSES, graphs=False)
    assert [spot.reason for spot in refused] == [GRAPH] * len(ADDRESSES)
    allowed = spots_in(layout, np.array([2, 20]) * MIB, graphs=True)
    assert [spot.reason for spot in allowed] == [None, PRIVATE]


def test_a_storage_comes_back_to_the_stream_that_it_is_of() -> None:
    layout = layout_of_raw([segment(2 * MIB), segment(6 * MIB, stream=77)], 0, AllocatorSettings())
    spots = spots_in(layout, np.array([7, 2, 6]) * MIB, graphs=False)
    assert [spot.stream for spot in spots] == [77, 0, 77]


class Chip:
    """A device whose segments are at the addresses of some CPU tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._segments = [segment(tensor.data_ptr(), total_size=tensor.numel()) for tensor in tensors]

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def layout(self) -> DeviceLayout:
        return layout_of_raw(self._segments, 0, AllocatorSettings())


def look(chip: Chip, *tensors: torch.Tensor) -> list[str | None]:
    ways = object.__new__(CudaWays)  # its streams need a GPU
    ways._chip = chip
    return [spot.reason for spot in ways.look([tensor.untyped_storage() for tensor in tensors], graphs=False)]


def test_foreign_memory_and_fixed_storages_stay() -> None:
    ours, theirs = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    fixed = torch.frombuffer(bytearray(4096), dtype=torch.uint8)
    chip = Chip(ours, fixed)
    assert look(chip, ours, theirs, fixed) == [None, NOT_OURS, FIXED]


def test_compaction_looks_past_what_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Memory of the host is the device's here, and a CUDA build of torch can tell that it is not.
    monkeypatch.delattr(torch._C, "_has_Standard_Deleter", raising=False)
    # As large as the segment's block, or other tensors of this process may be in that.
    mover, parked = torch.zeros(2 * MIB, dtype=torch.uint8), torch.nn.Parameter(torch.ones(8))
    layout = Chip(mover).layout()
    with memtriage.park(parked), torch._C.DisableTorchFunction(), StorageFinder() as find:
        messages = find(layout, [0])
    assert messages.reasons == {}
    assert [storage.data_ptr() for storage in messages.storages.values()] == [mover.data_ptr()]
    assert parked.sum().item() == 8


def test_while_a_graph_is_captured_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = torch.zeros(4096, dtype=torch.uint8)
    monkeypatch.setattr(cuda, "capturing", lambda: True)
    assert look(Chip(ours), ours) == [GRAPH]


def test_the_stand_in_has_nothing_that_the_device_has_not() -> None:
    own = {name for name, value in vars(Chip).items() if callable(value) and not name.startswith("_")}
    assert own <= set(dir(CudaDevice))
