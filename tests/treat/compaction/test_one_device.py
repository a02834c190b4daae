"""Compaction on the simulated device: what it frees, what it foretells, and that no value is ever lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.allocator.settings import SMALL_LIMIT
from memtriage.model.units import MIB
from memtriage.treat.compaction import plan
from memtriage.treat.compaction.move import SPARE
from memtriage.treat.compaction.one_device import PRIVATE, compact_device, predict_device
from memtriage.treat.compaction.plan import tolerated
from memtriage.treat.compaction.relocate import CompactionError
from memtriage.treat.device.layout import DeviceLayout
from support.compaction import World, fragmented, make_world

CONFS = ("", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:8")

SMALL = [600 + 37 * index % 50_000 for index in range(0, 90_000, 30)]
LARGE = [MIB + 70_000 * (index * 7 % 101) for index in range(60)]
WAIT_S = 30
"""Until what must come of itself is taken not to come any more."""


def reserved_limit(allocated: int) -> float:
    return 1.02 * allocated + 64e6


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


def test_a_second_time_nothing_moves() -> None:
    world = fragmented(SMALL + LARGE, 6)
    first = compact_device(world.device, world.finder)
    second = compact_device(world.device, world.finder)
    assert first.moved > 0
    assert second.moved == 0
    assert second.after == second.before == first.after


def test_what_is_whole_is_not_looked_for() -> None:
    world = make_world()
    for _ in range(20):
        world.allocate(20 * MIB)

    def find(*_: object) -> plan.Movable:
        raise AssertionError("nothing is stranded, so nobody is to be looked for")

    assert compact_device(world.device, lambda: nullcontext(find)).moved == 0


def test_lone_large_block_moves_to_a_segment_of_its_size() -> None:
    world = make_world()
    halves = [world.allocate(size * MIB) for size in (200, 11)]
    world.free(halves[:1])
    world.allocate(15 * MIB)  # Into the segment of 200 MiB.
    done = compact_device(world.device, world.finder)
    assert done.storages == 1
    assert done.through_host == 0
    assert world.device.use().reserved == (12 + 16) * MIB
    assert world.intact()


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


def test_blocks_of_every_stream_stay_with_their_stream() -> None:
    world = make_world()
    for stream in (0, 7):
        made = [world.allocate(size, stream) for size in SMALL + LARGE]
        world.free([storage for index, storage in enumerate(made) if index % 6])
    streams = [storage.block.arena.stream for storage in world.storages if storage.block is not None]
    done = compact_device(world.device, world.finder)
    assert done.moved > 0
    assert [storage.block.arena.stream for storage in world.storages if storage.block is not None] == streams
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


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_compaction_works_without_free_device_memory(sizes: list[int]) -> None:
    world = fragmented(sizes, 3)
    world.device.empty_cache()
    reserved = world.device.use().reserved
    driver = world.device.simulator.backing._driver
    driver.capacity = reserved
    done = compact_device(world.device, world.finder)
    assert world.intact()
    assert done.stopped is None
    assert done.after is not None
    assert done.after.reserved < reserved


def test_a_full_device_leaves_the_host() -> None:
    world = make_world(capacity=400 * MIB)
    large = [world.allocate(100 * MIB) for _ in range(4)]
    world.free(large)
    kept = [world.allocate(96 * MIB) for _ in range(3)]
    world.free(kept[:1])
    tenants = [world.allocate(9 * MIB) for _ in range(4)]
    assert tenants
    done = compact_device(world.device, world.finder)
    assert world.intact()
    assert done.stopped is None


# Faults.

ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: MemoryError("out of memory"),
    lambda: RuntimeError("a device error"),
    lambda: KeyboardInterrupt(),
)


class Faults:
    """Raises from the `first` operation on, `count` times. Is silent until armed."""

    def __init__(self, first: int, count: int, error: Callable[[], BaseException]) -> None:
        self._left, self._count, self._error = first, count, error
        self.armed = False

    def __call__(self, operation: str) -> None:
        if not self.armed:
            return
        self._left -= 1
        if self._left < 0 and self._left >= -self._count:
            raise self._error()


sizes_of_blocks = st.lists(
    st.one_of(
        st.integers(1, 3000),
        st.integers(30_000, MIB),
        st.sampled_from([MIB + 1, 3 * MIB, 5 * MIB, 9 * MIB + 77, 11 * MIB, 23 * MIB]),
    ),
    min_size=2,
    max_size=24,
)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = make_world(draw(st.sampled_from(CONFS)))
    for _ in range(draw(st.integers(1, 2))):
        stream = draw(st.sampled_from([0, 7]))
        made = [world.allocate(size, stream) for size in draw(sizes_of_blocks)]
        gone = draw(st.lists(st.sampled_from(range(len(made))), unique=True))
        world.free([made[index] for index in gone])
    return world


def restored(error: CompactionError | None) -> None:
    if error is not None:
        error.restore()


@pytest.mark.parametrize("error", ERRORS, ids=["memory", "device", "interrupt"])
@pytest.mark.parametrize("size", [5 * MIB, 15 * MIB], ids=["by scratch", "directly"])
def test_nothing_works_from_some_moment_on(size: int, error: Callable[[], BaseException]) -> None:
    for first in range(40):
        world = make_world()
        world.free([world.allocate(120 * MIB)])
        made = [world.allocate(size + index) for index in range(5)]
        world.free(made[1:3])
        assert_intact_after(world, Faults(first, 10_000, error))


@given(worlds(), st.integers(0, 80), st.sampled_from([1, 2, 5, 10_000]), st.sampled_from(ERRORS))
def test_whatever_fails_whenever_every_value_is_there(
    world: World, first: int, count: int, error: Callable[[], BaseException]
) -> None:
    assert_intact_after(world, Faults(first, count, error))


def assert_intact_after(world: World, faults: Faults) -> None:
    world.device.before = faults
    faults.armed = True
    held: CompactionError | None = None
    with mock.patch.object(plan, "LEFT_BYTES", 0):
        try:
            compact_device(world.device, world.finder)
        except CompactionError as raised:
            held = raised
        except (MemoryError, RuntimeError, KeyboardInterrupt):
            pass
    faults.armed = False
    restored(held)
    assert world.intact()


@given(worlds(), st.integers(0, 40), st.integers(1, 60))
def test_memory_taken_by_others_meanwhile_costs_no_value(world: World, when: int, megabytes: int) -> None:
    """Another thread allocates in the middle, on a device that has no memory to spare."""
    device, simulator = world.device, world.device.simulator
    device.empty_cache()
    driver = simulator.backing._driver
    driver.capacity = driver.used + SPARE + 8 * MIB
    left = [when]
    taken = []

    def thief(operation: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            try:
                taken.append(simulator.malloc(megabytes * MIB))
            except MemoryError:
                return

    device.before = thief
    held: CompactionError | None = None
    with mock.patch.object(plan, "LEFT_BYTES", 0):
        try:
            compact_device(device, world.finder)
        except CompactionError as raised:
            held = raised
    device.before = None
    for block in taken:
        simulator.free(block)
    restored(held)
    assert world.intact()


def test_copy_does_not_grow_from_a_hole_of_an_expandable_segment() -> None:
    """A hole before unmapped pages is too small for the copy, which would begin in it and keep its page."""
    world = make_world("expandable_segments:True")
    made = [world.allocate(size) for size in (5 * MIB, 9 * MIB + 77, 9 * MIB + 77, 5 * MIB)]
    world.free(made[2:3])
    with mock.patch.object(plan, "LEFT_BYTES", 0):
        done = compact_device(world.device, world.finder)
    assert done.after is not None
    assert (done.before.reserved, done.after.reserved) == (40 * MIB, 20 * MIB)
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
