"""Compaction on the simulated device: what it frees, what it foretells, and that no value is ever lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from unittest import mock

import pytest
from hypothesis import given

from memtriage.allocator.settings import SMALL_LIMIT
from memtriage.model.units import MIB
from memtriage.treat.compaction import plan
from memtriage.treat.compaction.one_device import PRIVATE, compact_device, predict_device
from memtriage.treat.compaction.plan import tolerated
from memtriage.treat.device.protocol import DeviceLayout
from support.compaction import CONFS, LARGE, SMALL, World, fragmented, make_world, worlds

WAIT_S = 30
"""Until what must come of itself is taken not to come any more."""


@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.parametrize("sizes", [SMALL, LARGE, SMALL + LARGE], ids=["small", "large", "mixed"])
def test_memory_goes_back_as_foretold_and_values_stay(sizes: list[int], conf: str) -> None:
    world = fragmented(sizes, 6, conf, grain=1)
    before = world.device.use()
    foretold = predict_device(world.device, world.finder)
    assert world.device.use() == before
    done = compact_device(world.device, world.finder)
    assert done.after is not None
    assert done.before == before
    assert done.after.allocated == sum(
        storage.block.size for storage in world.storages if storage.block is not None
    )
    assert done.after.reserved < before.reserved
    # Only here pages of 20 MiB are large beside what is alive.
    assert done.after.reserved - done.after.allocated <= tolerated(done.after.allocated) + 44 * MIB
    assert foretold.predicted == done.after
    assert (foretold.moved, foretold.storages) == (done.moved, done.storages)
    assert foretold.after is None
    assert world.intact()


def test_what_is_whole_is_not_looked_for() -> None:
    world = make_world()
    for _ in range(20):
        world.allocate(20 * MIB)

    def find(*_: object) -> plan.Movable:
        raise AssertionError("nothing is stranded, so nobody is to be looked for")

    assert compact_device(world.device, lambda: nullcontext(find)).moved == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_search_that_fails_moves_nothing_and_keeps_nothing(error: type[BaseException]) -> None:
    world = fragmented(LARGE, 6)
    addresses = [storage.data_ptr() for storage in world.storages]

    def find(layout: DeviceLayout, blocks: Sequence[int]) -> plan.Movable:
        raise error

    with pytest.raises(error):
        compact_device(world.device, lambda: nullcontext(find))
    assert [storage.data_ptr() for storage in world.storages] == addresses
    assert not world.device._held
    assert world.intact()


def test_the_driver_works_while_storages_are_looked_for() -> None:
    world = fragmented(LARGE, 6)
    looking = threading.Event()
    given_back = []

    def before(operation: str) -> None:
        if operation == "empty_cache":
            given_back.append(looking.wait(WAIT_S))

    def find(layout: DeviceLayout, blocks: Sequence[int]) -> plan.Movable:
        looking.set()
        return world.find(layout, blocks)

    world.device.before = before
    done = compact_device(world.device, lambda: nullcontext(find))
    assert done.moved > 0
    assert given_back[0], "the search begins only when what is free has been given back"
    assert world.intact()


@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.parametrize("operation", ["synchronize", "empty_cache", "allocate", "resize", "copy"])
def test_an_error_of_any_operation_passes(operation: str, time: int) -> None:
    """Whichever thread it is in; and nothing waits for ever for the one that has failed."""
    world = fragmented(4 * LARGE, 6)
    left = [time]

    def before(name: str) -> None:
        left[0] -= name == operation
        if name == operation and left[0] == 0:
            raise RuntimeError("a device error")

    world.device.before = before
    with pytest.raises(RuntimeError, match="a device error"):
        compact_device(world.device, world.finder)
    world.device.before = None
    assert not world.device._held
    assert world.intact()


def test_private_pools_stay_and_are_told() -> None:
    world = make_world()
    made = [world.allocate(size, pool=(0, 3)) for size in LARGE]
    world.free(made[1:])
    address = made[0].data_ptr()
    done = compact_device(world.device, world.finder)
    assert made[0].data_ptr() == address
    assert done.moved == 0
    (row,) = done.refused
    assert (row.reason, row.blocks) == (PRIVATE, 1)
    assert row.stranded > 0


def test_a_block_that_is_nobodys_keeps_its_segment_and_no_other() -> None:
    world = make_world()
    made = [world.allocate(9 * MIB) for _ in range(20)]
    world.free([storage for index, storage in enumerate(made) if index % 2])
    stranger = made[0]
    movable = World(world.device, world.storages[1:], world.values[1:])
    address = stranger.data_ptr()
    done = compact_device(world.device, movable.finder)
    assert stranger.data_ptr() == address
    assert [(row.reason, row.blocks) for row in done.refused] == [("nobody's", 1)]
    assert done.after is not None
    assert done.after.reserved <= 10 * 9 * MIB + 20 * MIB
    assert world.intact()


@given(worlds())
def test_the_plan_comes_true_and_never_makes_it_worse(world: World) -> None:
    with mock.patch.object(plan, "LEFT_BYTES", 0):
        foretold = predict_device(world.device, world.finder)
        done = compact_device(world.device, world.finder)
    assert done.after is not None
    assert foretold.predicted == done.after
    assert done.after.reserved <= done.before.reserved
    # A rest too small to be cut off stays with its block: of each segment that is there now, one at most.
    segments = len(world.device.layout().places)
    assert done.after.allocated <= done.before.allocated + SMALL_LIMIT * segments
    assert not world.device._held
    assert world.intact()
