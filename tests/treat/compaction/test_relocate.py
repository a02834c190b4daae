"""Values that cannot go back at once are in the error, and come back by it."""

from __future__ import annotations

import numpy as np
import pytest

from memtriage.model.units import MIB
from memtriage.treat.compaction.relocate import CompactionError, MoveBatch, Relocation
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
