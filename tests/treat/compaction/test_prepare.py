"""Bins that are made for a plan while its storages are looked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memtriage.model.units import MIB
from memtriage.treat.compaction.islands import islands_of
from memtriage.treat.compaction.plan import CompactionPlan, make_plan
from memtriage.treat.compaction.prepare import Prepared, make_bins
from memtriage.treat.device.layout import DeviceLayout
from memtriage.treat.device.protocol import Use
from support.compaction import World, make_world

SPARE = 30 * MIB


def planned() -> tuple[World, DeviceLayout, CompactionPlan]:
    """Two streams, each with a large block alone in a segment that is far too large."""
    world = make_world()
    for stream in (0, 7):
        halves = [world.allocate(size * MIB, stream) for size in (200, 15)]
        world.free(halves[:1])
        world.allocate(21 * MIB, stream)
    world.device.empty_cache()
    layout = world.device.layout()
    return world, layout, make_plan(layout, islands_of(layout), None, world.device.use().allocated)


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
    make_bins(prepared, layout, plan, SPARE)
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


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (lambda: MemoryError("out of memory"), False),
        (lambda: RuntimeError("a device error"), True),
        (lambda: KeyboardInterrupt(), True),
    ],
)
def test_an_error_leaves_no_bin(error: Callable[[], BaseException], passes: bool) -> None:
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
    if passes:
        with pytest.raises(type(error())):
            make_bins(prepared, layout, plan, SPARE)
    else:
        make_bins(prepared, layout, plan, SPARE)
    world.device.before = None
    assert reserved and wanted
    assert (prepared.bins, world.device._held) == ({}, {})
    world.device.empty_cache()
    assert world.device.use() == before
