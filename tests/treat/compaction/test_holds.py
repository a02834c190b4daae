"""Free memory that is held, so that what is allocated meanwhile goes elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memtriage.allocator.settings import parse_conf
from memtriage.model.units import MIB
from memtriage.treat.compaction.holds import Holds, largest_request, release_all
from memtriage.treat.compaction.islands import islands_of
from support.compaction import World, make_world

DIVIDED = "roundup_power2_divisions:4"


@pytest.mark.parametrize(
    ("conf", "size", "asked"),
    [
        ("", 512, 512),
        ("", 20 * MIB, 20 * MIB),
        (DIVIDED, 20 * MIB, 20 * MIB),
        (DIVIDED, 21 * MIB, 20 * MIB),
        (DIVIDED, 24 * MIB - 512, 20 * MIB),
        (DIVIDED, 24 * MIB, 24 * MIB),
        (DIVIDED, 512, 512),
    ],
)
def test_the_largest_request_is_that_which_is_not_rounded_above_the_block(
    conf: str, size: int, asked: int
) -> None:
    settings = parse_conf(conf, "2.11.0")
    assert largest_request(size, settings) == asked
    assert settings.round_size(asked) <= size
    assert settings.round_size(asked + 1) > size or asked == size


def with_holes(*sizes: int) -> tuple[World, list[int]]:
    """A device with free blocks of these MiB between blocks in use, and the addresses of the free ones."""
    world = make_world()
    world.free([world.allocate(200 * MIB)])
    made = [world.allocate(size * MIB) for hole in sizes for size in (hole, 2)]
    addresses = [storage.data_ptr() for storage in made[::2]]
    world.free(made[::2])
    return world, addresses


def free_blocks(world: World) -> list[int]:
    return sorted(
        block.size // MIB for segment in world.device.simulator.snapshot() for block in segment.blocks
        if block.state == "free"
    )  # fmt: skip


def holds(world: World) -> Holds:
    return Holds(world.device, 0, world.device.simulator.settings)


def test_what_is_held_is_not_handed_out_until_the_end() -> None:
    world, (first, second) = with_holes(6, 10)
    with holds(world) as held:
        held.take(first, 6 * MIB)
        assert free_blocks(world) == [10, 180]
        assert world.allocate(6 * MIB).data_ptr() == second
    assert free_blocks(world) == [4, 6, 180]


@pytest.mark.parametrize("parts", [(20,), (20, 2), (20, 3), (20, 3, 3)])
def test_what_rounding_leaves_of_a_hole_is_held_too(parts: tuple[int, ...]) -> None:
    """Of 22 MiB no more than 20 can be asked for; the 2 behind them are asked for next."""
    world = make_world(DIVIDED)
    world.free([world.allocate(224 * MIB)])
    made = [world.allocate(size * MIB) for size in (*parts, 2)]
    hole, address = sum(parts), made[0].data_ptr()
    world.free(made[:-1])
    assert free_blocks(world) == [hole, 222 - hole]
    with holds(world) as held:
        held.take(address, hole * MIB)
        assert free_blocks(world) == [222 - hole]
    assert free_blocks(world) == [hole, 222 - hole]


def test_where_memory_is_out_nothing_is_held() -> None:
    world, _ = with_holes(6)
    world.device.before = raising(MemoryError("out of memory"), "allocate")
    with holds(world) as held:
        held.take(1 << 40, 6 * MIB)
        world.device.before = None
        assert free_blocks(world) == [6, 192]


def raising(error: BaseException, operation: str, times: int = 1) -> Callable[[str], None]:
    left = [times]

    def before(name: str) -> None:
        if name == operation and left[0] > 0:
            left[0] -= 1
            raise error

    return before


def test_another_error_passes_and_keeps_nothing() -> None:
    world, (first, _) = with_holes(6, 10)
    error = RuntimeError("a device error")
    with pytest.raises(RuntimeError, match="a device error"), holds(world) as held:
        held.take(first, 6 * MIB)
        world.device.before = raising(error, "allocate")
        held.take(first, 10 * MIB)
    assert free_blocks(world) == [6, 10, 180]


def test_holes_of_islands_are_held_and_given_back_island_by_island() -> None:
    world = make_world()
    world.free([world.allocate(40 * MIB)])
    made = [world.allocate(size * MIB) for size in (2, 9, 2, 27)]
    world.free([world.allocate(40 * MIB)])
    more = [world.allocate(size * MIB) for size in (3, 12, 25)]
    world.free([made[1], more[1]])
    assert free_blocks(world) == [9, 12]
    layout = world.device.layout()
    islands = sorted(islands_of(layout), key=lambda island: island.stranded)
    with holds(world) as held:
        held.take_holes(layout, islands, at_least=10 * MIB)
        assert free_blocks(world) == [9]
    with holds(world) as held:
        held.take_holes(layout, islands)
        assert free_blocks(world) == []
        held.let_go(islands[:1])
        assert free_blocks(world) == [9]
        held.let_go([])
        assert free_blocks(world) == [9]
    assert free_blocks(world) == [9, 12]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_release_that_fails_keeps_no_other_and_is_raised(failing: int) -> None:
    world = make_world()
    addresses = [world.device.allocate(MIB * 2, 0) for _ in range(3)]
    world.device.before = raising(RuntimeError("of the release"), "release", failing)
    if failing:
        with pytest.raises(RuntimeError, match="of the release"):
            release_all(world.device, addresses)
    else:
        release_all(world.device, addresses)
    assert addresses == []
    assert len(world.device._held) == failing


def test_and_hides_no_error_under_way() -> None:
    world = make_world()
    with pytest.raises(KeyError), holds(world) as held:
        held.take(world.device.allocate(2 * MIB, 0), 2 * MIB)
        world.device.before = raising(RuntimeError("of the release"), "release")
        raise KeyError
