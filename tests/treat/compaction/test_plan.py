"""Plans: only what may move does, the best first, and bins are as large as what is to be in them."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.allocator.settings import OWN_SEGMENT, SMALL_SEGMENT
from memtriage.model.units import MIB
from memtriage.treat.compaction import plan as planning
from memtriage.treat.compaction.islands import islands_of
from memtriage.treat.compaction.one_device import compact_device
from memtriage.treat.compaction.plan import CompactionPlan, make_plan, tolerated
from memtriage.treat.device.protocol import ACTIVE, DeviceLayout
from support.compaction import World, fragmented, make_world

LARGE = [MIB + 70_000 * (index * 7 % 101) for index in range(200)]


def plan_of(world: World, **options: int) -> tuple[DeviceLayout, CompactionPlan]:
    world.device.empty_cache()
    layout = world.device.layout()
    return layout, make_plan(layout, islands_of(layout), None, world.device.use().allocated, **options)


@given(st.data())
def test_only_whole_islands_of_movable_blocks_are_emptied(data: st.DataObject) -> None:
    world = fragmented(LARGE, 5)
    world.device.empty_cache()
    layout = world.device.layout()
    live = [index for index, state in enumerate(layout.state.tolist()) if state == ACTIVE]
    movable = set(data.draw(st.lists(st.sampled_from(live), unique=True)))
    with mock.patch.object(planning, "LEFT_BYTES", 0):
        plan = make_plan(layout, islands_of(layout), movable, 0)
    assert set(plan.blocks) <= movable
    assert len(plan.blocks) == len(set(plan.blocks))
    emptied = {block for group in plan.groups for island in group.islands for block in island.blocks}
    assert emptied == set(plan.blocks)


def test_most_stranded_for_each_byte_moved_goes_first() -> None:
    world = make_world()
    made = [world.allocate(9 * MIB + 1000 * index) for index in range(40)]
    world.free(made[1::2])
    sparse = [world.allocate(2 * MIB) for _ in range(8)]
    world.free(sparse[:7])
    layout, plan = plan_of(world)
    ratios = [island.stranded / island.live for group in plan.groups for island in group.islands]
    assert ratios == sorted(ratios, reverse=True)
    left = sum(island.stranded for island in islands_of(layout)) - sum(
        island.stranded for group in plan.groups for island in group.islands
    )
    assert left <= tolerated(world.device.use().allocated)


def test_small_blocks_go_where_the_densest_islands_have_room() -> None:
    world = fragmented([600 + 37 * index % 50_000 for index in range(0, 120_000, 30)], 3)
    layout, plan = plan_of(world)
    (group,) = plan.groups
    going = {island.start for island in group.islands}
    staying = [island for island in islands_of(layout) if island.start not in going]
    assert staying
    assert max(island.live for island in group.islands) <= min(storage.live for storage in staying)
    assert sum(island.live for island in group.islands) <= sum(storage.stranded for storage in staying)
    # What stays has just the room for all, and without the last island that goes it would still be too much.
    islands = islands_of(layout)
    live = sum(island.live for island in islands)
    room = sum(island.end - island.start for island in staying)
    assert room >= int(live / planning.FILL)
    left = sum(island.stranded for island in islands) - sum(
        island.end - island.start for island in group.islands
    )
    last = group.islands[-1]
    assert left + last.end - last.start > tolerated(world.device.use().allocated)
    done = compact_device(world.device, world.finder)
    assert done.after is not None
    assert done.after.reserved - done.after.allocated <= tolerated(done.after.allocated)


def test_small_blocks_may_claim_most_of_what_may_stay() -> None:
    """Half each would be too little for the holes that they leave, and all of them would have to move."""
    small = [300_000 + 37 * index % 400_000 for index in range(0, 120_000, 85)]
    world = fragmented(small + LARGE, 3)
    layout, plan = plan_of(world)
    live = dict.fromkeys((True, False), 0)
    for island in islands_of(layout):
        live[island.place.small] += island.live
    wanted = live[True] / planning.FILL - live[True]
    allowed = tolerated(world.device.use().allocated)
    assert allowed / 2 < wanted <= planning.FILL_SHARE * allowed
    (group,) = [group for group in plan.groups if group.small]
    assert sum(island.live for island in group.islands) < 0.8 * live[True]
    done = compact_device(world.device, world.finder)
    assert done.after is not None
    assert done.after.reserved - done.after.allocated <= tolerated(done.after.allocated) + SMALL_SEGMENT
    assert world.intact()


def test_little_is_left_alone() -> None:
    world = make_world()
    made = [world.allocate(9 * MIB) for _ in range(4)]
    world.free(made[:1])
    _, plan = plan_of(world)
    assert plan == CompactionPlan()


def test_bins_fit_what_lies_in_them_and_keep_to_their_limit() -> None:
    limit = 40 * MIB
    layout, plan = plan_of(fragmented(LARGE, 3), bin_limit=limit)
    (group,) = plan.groups
    bins = [target for target in group.bins if target.size]
    assert len(bins) > 1
    for target in bins:
        needs = [layout.settings.round_size(int(layout.requested[block])) for block in target.blocks]
        assert max(sum(needs), OWN_SEGMENT) == target.size <= limit
        assert needs == sorted(needs, reverse=True)


@pytest.mark.parametrize("size", [8 * MIB, 9 * MIB])
def test_blocks_too_large_to_be_split_get_bins_of_their_own(size: int) -> None:
    world = make_world("max_split_size_mb:24")
    cached = [world.allocate(60 * MIB) for _ in range(3)]
    world.free(cached)
    made = [world.allocate(size) for _ in range(30)]
    world.free(made[::2])
    _, plan = plan_of(world)
    for group in plan.groups:
        assert group.bins
        for target in group.bins:
            assert target.size < 24 * MIB or len(target.blocks) == 1


@pytest.mark.parametrize(("size", "way"), [(3 * MIB, "scratch"), (15 * MIB, "direct")])
def test_few_large_blocks_move_directly(size: int, way: str) -> None:
    world = make_world()
    cached = [world.allocate(200 * MIB) for _ in range(3)]
    world.free(cached)
    made = [world.allocate(size) for _ in range(36)]
    world.free([storage for index, storage in enumerate(made) if index % 9])
    _, plan = plan_of(world)
    assert [group.way for group in plan.groups] == [way]


@given(st.lists(st.integers(1, 40 * MIB), max_size=30), st.lists(st.integers(MIB + 1, 30 * MIB), max_size=30))
def test_holes_are_filled_as_the_allocator_would(holes: list[int], sizes: list[int]) -> None:
    """The same requests to the simulator, of which each hole is a segment."""
    world = make_world()
    rounded = sorted((-(-hole // 512) * 512 for hole in holes if hole > MIB), reverse=True)
    made = [world.allocate(-(-hole // (2 * MIB)) * 2 * MIB + 20 * MIB) for hole in rounded]
    world.free(made)
    free = sorted(-(-hole // (2 * MIB)) * 2 * MIB + 20 * MIB for hole in rounded)
    before = world.device.use().reserved
    for size in sorted((-(-size // 512) * 512 for size in sizes), reverse=True):
        taken = planning._take_hole(free, size, None)
        world.allocate(size)
        after = world.device.use().reserved
        assert taken == (after == before)
        if not taken:
            return
        before = after
