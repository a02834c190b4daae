"""The simulated device: storages, bytes behind addresses, and a device made from a layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memtriage.allocator.driver import ALIGNMENT, TOP
from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.treat.device.layout import layout_of_segments
from memtriage.treat.device.protocol import Use
from memtriage.treat.device.simulated import UNLIMITED, SimulatedDevice, SimulatedStorage, simulate
from support.simulated_memory import STALE, VERSION, DeviceWithBytes, SimulatedMemory

MIB = 1 << 20


def heard(memory: SimulatedMemory, action: str, address: int, size: int) -> None:
    memory.heard(AllocatorEvent(action, address, size, 0, (0, 0)))  # type: ignore[arg-type]


def values(count: int, first: int = 0) -> np.ndarray:
    return ((np.arange(count) + first) % 251).astype(np.uint8)


@pytest.mark.parametrize(
    ("grain", "nbytes", "kept"), [(1, 5, 5), (512, 512, 1), (512, 513, 2), (512, 0, 0), (4, 7, 2)]
)
def test_of_so_many_bytes_one_is_kept(grain: int, nbytes: int, kept: int) -> None:
    assert SimulatedMemory(grain).length(nbytes) == kept


@pytest.mark.parametrize("grain", [1, 512])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 512),
        (512, 1024),
        (ALIGNMENT - 512, 1024),
        (ALIGNMENT - 512, 512),
        (ALIGNMENT, 512),
        (0, 3 * ALIGNMENT),
    ],
)
def test_what_was_written_is_read_across_pages(grain: int, offset: int, nbytes: int) -> None:
    memory, base = SimulatedMemory(grain), 1 << 40
    heard(memory, "segment_alloc", base, 3 * ALIGNMENT)
    count = memory.length(nbytes)
    memory.write(base + offset, values(count))
    assert (memory.read(base + offset, nbytes) == values(count)).all()
    whole = memory.read(base, 3 * ALIGNMENT)
    first = offset // grain
    assert len(whole) == 3 * memory.length(ALIGNMENT)
    assert (whole[:first] == STALE).all()
    assert (whole[first + count :] == STALE).all()
    assert len(memory.read(base, 0)) == 0


@pytest.mark.parametrize(
    ("come", "go"), [("segment_alloc", "segment_free"), ("segment_map", "segment_unmap")]
)
def test_memory_that_the_driver_has_cannot_be_read_or_written(come: str, go: str) -> None:
    memory, base = SimulatedMemory(512), 1 << 40
    with pytest.raises(KeyError):
        memory.read(base, 512)
    heard(memory, come, base, 2 * ALIGNMENT)
    heard(memory, go, base + ALIGNMENT, ALIGNMENT)
    memory.write(base, values(1))
    with pytest.raises(KeyError):
        memory.read(base, 2 * ALIGNMENT)
    with pytest.raises(KeyError):
        memory.write(base + ALIGNMENT, values(1))


@pytest.mark.parametrize("action", ["alloc", "free_completed"])
def test_memory_that_changes_hands_is_overwritten(action: str) -> None:
    memory, base = SimulatedMemory(), 1 << 40
    heard(memory, "segment_alloc", base, ALIGNMENT)
    memory.write(base, values(2048))
    heard(memory, "free_requested", base, 1024)
    heard(memory, "oom", 0, 1024)
    assert (memory.read(base, 2048) == values(2048)).all()
    heard(memory, action, base, 1024)
    assert (memory.read(base, 1024) == STALE).all()
    assert (memory.read(base + 1024, 1024) == values(1024, 1024)).all()


def storage_on(one: DeviceWithBytes, nbytes: int) -> SimulatedStorage:
    storage = SimulatedStorage(one.simulator.malloc(nbytes), nbytes)
    one.memory.write(storage.data_ptr(), values(nbytes))
    return storage


def content(one: DeviceWithBytes, storage: SimulatedStorage) -> np.ndarray:
    return one.memory.read(storage.data_ptr(), storage.nbytes())


def test_a_storage_is_where_its_block_is() -> None:
    one = DeviceWithBytes(index=3)
    storage = storage_on(one, 1000)
    assert (one.name, storage.nbytes(), storage.data_ptr()) == ("cuda:3", 1000, storage.block.address)  # type: ignore[union-attr]
    storage.become(None, 0)
    assert (storage.nbytes(), storage.data_ptr(), storage.block) == (0, 0, None)


@pytest.mark.parametrize(("size", "kept"), [(1000, 1000), (400, 400), (3000, 1000)])
def test_a_storage_that_is_resized_moves_with_its_bytes(size: int, kept: int) -> None:
    one = DeviceWithBytes()
    storage = storage_on(one, 1000)
    before = storage.data_ptr()
    one.resize([storage], [size], 0)
    assert storage.data_ptr() != before
    assert storage.nbytes() == size
    assert (content(one, storage)[:kept] == values(kept)).all()
    assert (content(one, storage)[kept:] == STALE).all()
    assert one.use() == Use(-(-size // 512) * 512, 2 * MIB)


def test_from_and_to_nothing_no_bytes_are_copied() -> None:
    one = DeviceWithBytes()
    storage, other = storage_on(one, 1000), storage_on(one, 512)
    one.resize([storage, other], [0, 0], 0)
    assert (storage.data_ptr(), one.use()) == (0, Use(0, 2 * MIB))
    one.resize([storage, other], [1000, 512], 7)
    assert (content(one, storage) == STALE).all()
    assert [each.block.arena.stream for each in (storage, other) if each.block] == [7, 7]
    assert one.use() == Use(1536, 4 * MIB)


def test_bytes_are_copied_between_storages_and_with_the_host() -> None:
    one = DeviceWithBytes()
    first, second, third = (storage_on(one, size) for size in (1024, 512, 512))
    addresses = np.array([second.data_ptr(), third.data_ptr()])
    one.copy(addresses, first.data_ptr() + np.array([512, 0]), np.array([512, 100]), 0)
    assert (content(one, second) == values(512, 512)).all()
    assert (content(one, third) == values(512)).all()
    host = torch.zeros(600, dtype=torch.uint8)
    one.download(host[:512], second.data_ptr())
    assert host.tolist() == [*values(512, 512).tolist(), *[0] * 88]
    one.upload(first.data_ptr(), host)
    assert (content(one, first)[:600] == host.numpy()).all()


def test_blocks_that_no_storage_owns_are_given_back_once() -> None:
    one = DeviceWithBytes()
    address = one.allocate(3 * MIB, 7)
    assert one.use() == Use(3 * MIB, 20 * MIB)
    one.release(address)
    with pytest.raises(KeyError):
        one.release(address)
    one.empty_cache()
    assert one.use() == Use(0, 0)


@pytest.mark.parametrize(("capacity", "available"), [(None, UNLIMITED), (100 * MIB, 80 * MIB), (20 * MIB, 0)])
def test_what_the_driver_could_still_give(capacity: int | None, available: int) -> None:
    one = DeviceWithBytes(capacity=capacity)
    one.allocate(3 * MIB, 0)
    assert one.available() == available
    assert SimulatedDevice(one.simulator).available() == UNLIMITED == 1 << 60
    if capacity is not None and one._driver is not None:
        one._driver.capacity = 10 * MIB
        assert one.available() == 0


def test_every_operation_is_told_before_it_is_done() -> None:
    one = DeviceWithBytes()
    storage = storage_on(one, 512)
    done: list[tuple[str, int]] = []
    one.before = lambda name: done.append((name, one.use().allocated))
    one.synchronize()
    address = one.allocate(512, 0)
    one.resize([storage, storage], [512, 512], 0)
    one.copy(np.array([address]), np.array([storage.data_ptr()]), np.array([512]), 0)
    one.download(torch.zeros(4, dtype=torch.uint8), address)
    one.upload(address, torch.zeros(4, dtype=torch.uint8))
    one.release(address)
    one.empty_cache()
    one.layout()
    with one.entered():
        assert one.snapshot()().places
    assert done == [
        ("synchronize", 512), ("allocate", 512), ("resize", 1024), ("resize", 1024), ("copy", 1024),
        ("download", 1024), ("upload", 1024), ("release", 1024), ("empty_cache", 512), ("layout", 512),
        ("layout", 512),
    ]  # fmt: skip


def test_without_bytes_nothing_is_copied() -> None:
    one = SimulatedDevice(Simulator(parse_conf("", VERSION)))
    storage = SimulatedStorage(one.simulator.malloc(1000), 1000)
    one.resize([storage], [2000], 0)
    one.copy(np.array([1]), np.array([2]), np.array([3]), 0)
    host = torch.ones(4, dtype=torch.uint8)
    one.download(host, 5)
    one.upload(5, host)
    assert (storage.nbytes(), host.tolist()) == (2000, [1] * 4)


@pytest.mark.parametrize("conf", ["", "expandable_segments:True,large_segment_size_mb:32"])
def test_a_device_is_made_from_a_layout(conf: str) -> None:
    one = Simulator(parse_conf(conf, VERSION))
    kept = [
        one.malloc(size, stream) for size, stream in [(1000, 0), (3 * MIB, 0), (70 * MIB, 7), (5 * MIB, 0)]
    ]
    one.free(one.malloc(9 * MIB))
    one.record_stream(kept[-1], 5)
    one.free(kept[-1])
    snapshot = one.snapshot()
    layout = layout_of_segments(snapshot, one.settings)
    made, storages = simulate(layout, 100 * MIB)
    assert made.use() == Use(one.allocated, one.reserved)
    assert made.simulator.awaiting == one.awaiting == 5 * MIB
    assert {address: (each.nbytes(), each.data_ptr()) for address, each in storages.items()} == {
        block.address: (block.requested, block.address) for block in kept[:-1]
    }
    again = made.layout()
    assert [(place.address, place.size, place.stream, place.small) for place in again.places] == [
        (place.address, place.size, place.stream, place.small) for place in layout.places
    ]
    assert (again.size.tolist(), again.state.tolist()) == (layout.size.tolist(), layout.state.tolist())
    assert made.available() == 100 * MIB
    assert made.name == "cuda:0"
    lowest = min(segment.address for segment in snapshot)
    if not conf:
        assert made.allocate(30 * MIB, 9) == lowest // ALIGNMENT * ALIGNMENT - 30 * MIB


def test_a_device_without_segments_begins_at_the_top() -> None:
    made, storages = simulate(layout_of_segments((), parse_conf("", VERSION)), None)
    assert (storages, made.available(), made.allocate(30 * MIB, 0)) == ({}, UNLIMITED, TOP - 30 * MIB)
