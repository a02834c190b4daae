"""Where values are while their storages have no memory."""

from __future__ import annotations

import numpy as np
import pytest

from memtriage.allocator.settings import OWN_SEGMENT
from memtriage.model.units import MIB
from memtriage.treat.compaction.keep import Keep, OnDevice, OnHost
from support.compaction import World, make_world

SIZES = (3 * MIB, 512, 5 * MIB + 1024)


def parts() -> tuple[World, np.ndarray, np.ndarray, np.ndarray]:
    """A device with storages; their addresses, and the offsets and sizes of their values in a copy."""
    world = make_world()
    for size in SIZES:
        world.allocate(size)
    sizes = np.array(SIZES, np.int64)
    addresses = np.array([storage.data_ptr() for storage in world.storages], np.int64)
    return world, addresses, np.cumsum(sizes) - sizes, sizes


def overwrite(world: World) -> None:
    for storage in world.storages:
        world.memory.write(storage.data_ptr(), np.zeros(world.memory.length(storage.nbytes()), np.uint8))


@pytest.mark.parametrize("where", ["device", "host", "device, then host"])
def test_values_come_back_as_they_were(where: str) -> None:
    world, addresses, offsets, sizes = parts()
    done: list[str] = []
    keep: Keep
    if where == "host":
        keep = OnHost(world.device, offsets, sizes)
    else:
        keep = OnDevice(world.device, offsets, sizes, 0, 2 * MIB)
    world.device.before = done.append
    keep.save(addresses)
    saved, done[:] = list(done), []
    if where == "device, then host":
        assert isinstance(keep, OnDevice)
        on_device, keep = keep, keep.to_host()
        on_device.drop()
        done.clear()
    overwrite(world)
    assert not world.intact()
    keep.load(addresses)
    assert world.intact()
    if where == "device":
        assert (saved, done) == (["copy"] * 3, ["copy"] * 3 + ["synchronize"])
    else:
        assert done == ["upload"] * 3 + ["synchronize"]
    if where == "host":
        assert saved == ["synchronize"] + ["download"] * 3


@pytest.mark.parametrize(
    ("sizes", "page", "taken"),
    [
        ((3 * MIB, 512), 2 * MIB, OWN_SEGMENT),
        ((9 * MIB, MIB), 2 * MIB, 10 * MIB),
        ((10 * MIB, 512), 2 * MIB, 12 * MIB),
        ((10 * MIB, 512), 20 * MIB, 20 * MIB),
        ((20 * MIB,), 20 * MIB, 20 * MIB),
    ],
)
def test_a_copy_on_the_device_takes_whole_segments(sizes: tuple[int, ...], page: int, taken: int) -> None:
    world, each = make_world(), np.array(sizes, np.int64)
    copy = OnDevice(world.device, np.cumsum(each) - each, each, 7, page)
    (segment,) = world.device.simulator.snapshot()
    assert (world.device.use().allocated, segment.size, segment.stream) == (taken, taken, 7)
    copy.drop()
    copy.drop()
    assert world.device.use().allocated == 0
    assert not world.device._held


def test_without_room_there_is_no_copy_on_the_device() -> None:
    world = make_world(capacity=20 * MIB)
    each = np.array([21 * MIB], np.int64)
    with pytest.raises(MemoryError):
        OnDevice(world.device, np.cumsum(each) - each, each, 0, 2 * MIB)
