"""A plan is carried out: where storages go, and that no value is lost whatever fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.units import MIB
from memtriage.treat.compaction import plan
from memtriage.treat.compaction.islands import islands_of
from memtriage.treat.compaction.move import SPARE, Mover, Prepared, make_bins
from memtriage.treat.compaction.one_device import compact_device
from memtriage.treat.compaction.plan import CompactionPlan, make_plan
from memtriage.treat.compaction.relocate import CompactionError
from memtriage.treat.device.protocol import DeviceLayout, Use
from support.compaction import World, make_world, worlds


def lone(*streams: int) -> World:
    """Two large blocks of each stream, alone in a segment that is far too large for them."""
    world = make_world()
    for stream in streams or (0,):
        made = [world.allocate(size * MIB, stream) for size in (200, 15)]
        world.free(made[:1])
        world.allocate(21 * MIB, stream)
    return world


def lone_twice() -> World:
    return lone(0, 7)


def sparse(conf: str = "", size: int = 5 * MIB, count: int = 16, kept: int = 4) -> World:
    """One block in each so many is left."""
    world = make_world(conf)
    made = [world.allocate(size + number * 512) for number in range(count)]
    world.free([storage for number, storage in enumerate(made) if number % kept])
    return world


def plan_of(world: World) -> tuple[DeviceLayout, CompactionPlan]:
    layout = world.device.layout()
    with mock.patch.object(plan, "LEFT_BYTES", 0):
        return layout, make_plan(layout, islands_of(layout), None, world.device.use().allocated)


ALONE, FOUR = (21 * MIB, 0), (20_983_808, 0)
TWO, LONE = [(16, "a"), (22, "a")], (21 * MIB, 21 * MIB)

# by name: the device, whether bins are made before, room; ways besides resizing;
# bytes moved, and through the host; segments after
Case = tuple[Callable[[], World], bool, int | None, str, tuple[int, int], list[tuple[float, str]]]
MOVES: dict[str, Case] = {
    "a large block moves to a bin of its own": (lone, False, None, "", ALONE, TWO),
    "a large block moves to a bin that is there": (lone, True, None, "", ALONE, TWO),
    "without room for its bin and what is spared a large block moves by a copy": (
        lone, False, SPARE + 21 * MIB - 1, "copy", ALONE, TWO,
    ),
    "with just that room it moves to the bin": (lone, False, SPARE + 22 * MIB, "", ALONE, TWO),
    "without any room a large block moves by the host": (lone, False, 0, "host", LONE, TWO),
    "what one stream has left is given back before the next": (
        lone_twice, False, SPARE + 24 * MIB, "", (42 * MIB, 0), sorted(2 * TWO),
    ),
    "and then there is room for it": (lone_twice, False, 0, "host", (42 * MIB, 21 * MIB), sorted(2 * TWO)),
    "several blocks move together": (sparse, False, None, "copy", FOUR, [(22, "aaaaf")]),
    "several blocks move together to a bin that is there": (
        sparse, True, None, "copy", FOUR, [(22, "aaaaf")],
    ),
    "with little room they move in two batches": (
        sparse, False, SPARE + 16 * MIB, "copy", FOUR, [(16, "aaa"), (16, "fa")],
    ),
    "without room the first go by the host": (
        sparse, False, 0, "copy host", (20_983_808, 10_487_808), [(12, "aaf"), (12, "aaf")],
    ),
    "small blocks go where others of them were": (
        lambda: sparse(size=100_000, count=200, kept=5), False, None, "copy", (6_010_880, 0),
        [(2, 16 * "a" + "f"), (2, 13 * "a" + "f"), (2, 11 * "a" + "f")],
    ),
    "in expandable segments no bin is made": (
        lambda: sparse("expandable_segments:True", 9 * MIB, 20, 3), False, None, "copy", (66_092_544, 0),
        [(80, "aaaaaaaf")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "prepared", "room", "ways", "nbytes", "segments"), MOVES.values(), ids=MOVES
)
def test_how_storages_move(
    make: Callable[[], World],
    prepared: bool,
    room: int | None,
    ways: str,
    nbytes: tuple[int, int],
    segments: list[tuple[float, str]],
) -> None:
    """All that can move does, with as many bytes through the host as there is no room for."""
    world = make()
    device = world.device
    device.empty_cache()
    layout, planned = plan_of(world)
    bins = Prepared(device)
    if prepared:
        make_bins(bins, layout, planned)
        assert bins.bins
    driver = device.simulator.backing._driver
    driver.capacity = None if room is None else driver.used + room
    done: list[str] = []
    device.before = done.append
    storages = world.find(layout, planned.blocks).storages
    mover = Mover(device, layout, storages, bins, lambda: None)
    mover.prepare(planned)
    assert done == []
    mover.run(planned)
    device.before = None
    assert world.intact()
    assert (bins.bins, device._held) == ({}, {})
    assert (mover.moved.storages, len(planned.blocks)) == (len(storages),) * 2
    assert (mover.moved.bytes, mover.moved.through_host) == nbytes
    assert [way for way, name in (("copy", "copy"), ("host", "download")) if name in done] == ways.split()
    device.empty_cache()
    after = [
        (segment.size / MIB, "".join(block.state[0] for block in segment.blocks))
        for segment in device.simulator.snapshot()
    ]
    assert sorted(after) == sorted(segments)


@pytest.mark.parametrize(
    ("make", "operation", "time"),
    [
        (lone, "allocate", 1),
        (lone, "allocate", 2),
        (lone, "resize", 1),
        (sparse, "allocate", 1),
        (sparse, "allocate", 2),
        (sparse, "resize", 5),
    ],
)
@pytest.mark.parametrize("error", [RuntimeError("a device error"), MemoryError("out of memory")], ids=str)
def test_memory_that_is_out_once_is_got_over_and_other_errors_pass(
    make: Callable[[], World], operation: str, time: int, error: BaseException
) -> None:
    world, left = make(), [time]
    device = world.device

    def before(name: str) -> None:
        left[0] -= name == operation
        if name == operation and left[0] == 0:
            raise error

    device.empty_cache()
    layout, planned = plan_of(world)
    mover = Mover(device, layout, world.find(layout, planned.blocks).storages, Prepared(device), lambda: None)
    mover.prepare(planned)
    reserved = device.use().reserved
    device.before = before
    if isinstance(error, RuntimeError) or (operation, time) == ("resize", 5):
        with pytest.raises(type(error), match=str(error)):
            mover.run(planned)
    else:
        mover.run(planned)
        device.before = None
        device.empty_cache()
        assert device.use().reserved <= reserved
    device.before = None
    assert left[0] <= 0
    assert not device._held
    assert world.intact()


# --- faults -------------------------------------------------------------------------------------------------

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


@given(worlds(), st.integers(0, 80), st.sampled_from([1, 2, 5, 10_000]), st.sampled_from(ERRORS))
def test_whatever_fails_whenever_every_value_is_there(
    world: World, first: int, count: int, error: Callable[[], BaseException]
) -> None:
    faults = Faults(first, count, error)
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
    if held is not None:
        held.restore()
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
    if held is not None:
        held.restore()
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


def planned() -> tuple[World, DeviceLayout, CompactionPlan]:
    world = lone_twice()
    world.device.empty_cache()
    return world, *plan_of(world)


def sizes(plan: CompactionPlan) -> dict[tuple[int, int], int]:
    return {
        (number, index): target.size
        for number, group in enumerate(plan.groups)
        for index, target in enumerate(group.bins)
        if target.size
    }


def test_every_bin_of_a_plan_is_made_and_taken_once() -> None:
    world, layout, plan = planned()
    prepared, before = Prepared(world.device), world.device.use()
    make_bins(prepared, layout, plan)
    wanted = sizes(plan)
    assert len(wanted) == 2
    assert prepared.bins.keys() == wanted.keys()
    whole = sum(-(-size // (2 * MIB)) * 2 * MIB for size in wanted.values())
    assert world.device.use() == Use(before.allocated + whole, before.reserved + whole)
    streams = {segment.address: segment.stream for segment in world.device.simulator.snapshot()}
    assert [streams[address] for address in prepared.bins.values()] == [
        plan.groups[number].stream for number, _ in wanted
    ]
    first, second = wanted
    address = prepared.take(*first)
    assert address is not None
    assert prepared.take(*first) is None
    prepared.drop()
    assert prepared.bins == {}
    assert prepared.take(*second) is None
    world.device.release(address)
    world.device.empty_cache()
    assert world.device.use() == before


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_leaves_no_bin(error: Callable[[], BaseException]) -> None:
    world, layout, plan = planned()
    before, wanted = world.device.use(), list(sizes(plan).values())
    prepared = Prepared(world.device)
    reserved: list[int] = []

    def failing(operation: str) -> None:
        if operation == "allocate":
            if prepared.bins:
                raise error()
            reserved.append(world.device.use().reserved)

    world.device.before = failing
    passes = isinstance(error(), MemoryError)
    with nullcontext() if passes else pytest.raises(type(error())):
        make_bins(prepared, layout, plan)
    world.device.before = None
    assert reserved and wanted
    assert (prepared.bins, world.device._held) == ({}, {})
    world.device.empty_cache()
    assert world.device.use() == before
