"""Values that cannot go back at once are in the error, and come back by it."""

from __future__ import annotations

import numpy as np
import pytest

from memtriage.allocator.settings import OWN_SEGMENT
from memtriage.model.units import MIB
from memtriage.treat.compaction.relocate import CompactionError, Keep, MoveBatch, OnDevice, OnHost, Relocation
from memtriage.treat.device.protocol import Use
from support.compaction import World, make_world


def full_world() -> World:
    world = make_world()
    for _ in range(3):
        world.allocate(30 * MIB)
    return world


def relocation_of(world: World, *, on_host: bool) -> Relocation:
    addresses = np.array([storage.data_ptr() for storage in world.storages], np.int64)
    return Relocation(world.device, MoveBatch(list(world.storages), addresses), 0, on_host=on_host)


def taken_by_another_process(world: World) -> None:
    """All that is free is given back, and gone at once."""
    world.device.empty_cache()
    driver = world.device.simulator.backing._driver
    driver.capacity = driver.used


def test_the_error_holds_the_values_until_there_is_room() -> None:
    world = full_world()
    relocation = relocation_of(world, on_host=True)
    with pytest.raises(CompactionError, match=r"3 storages \(90\.0 MiB\)") as caught:
        relocation.run(lambda: taken_by_another_process(world))
    assert all(storage.nbytes() == 0 for storage in world.storages)
    with pytest.raises(MemoryError):
        caught.value.restore()
    world.device.simulator.backing._driver.capacity = None
    caught.value.restore()
    assert world.intact()
    assert world.device.use().allocated == 90 * MIB


def test_when_memory_is_taken_the_copy_gives_its_own_up() -> None:
    world = full_world()
    relocation = relocation_of(world, on_host=False)
    with pytest.raises(MemoryError):
        relocation.run(lambda: taken_by_another_process(world))
    assert world.intact()
    assert world.device.use() == Use(90 * MIB, 90 * MIB)


def test_what_a_step_raised_comes_through_once_all_is_back() -> None:
    world = full_world()

    def interrupted() -> None:
        raise KeyboardInterrupt

    relocation = relocation_of(world, on_host=False)
    with pytest.raises(KeyboardInterrupt):
        relocation.run(interrupted)
    assert world.intact()
    assert world.device.use().allocated == 90 * MIB


def test_without_room_for_the_copy_nothing_happens() -> None:
    world = make_world(capacity=100 * MIB)
    for _ in range(3):
        world.allocate(30 * MIB)
    with pytest.raises(MemoryError):
        relocation_of(world, on_host=False)
    assert world.intact()


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
