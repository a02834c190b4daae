"""Islands: what can go back to the driver once it is empty, against a count of every page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memtriage.allocator.settings import LARGE_SEGMENT, SMALL_SEGMENT
from memtriage.model.units import MIB
from memtriage.treat.compaction.islands import holes_of, islands_of
from memtriage.treat.device.protocol import FREE, DeviceLayout
from support.compaction import World, make_world

sizes = st.lists(
    st.sampled_from([700, 60_000, MIB, MIB + 512, 7 * MIB, 12 * MIB, 33 * MIB]), min_size=1, max_size=30
)


@st.composite
def layouts(draw: st.DrawFn) -> DeviceLayout:
    world: World = make_world(draw(st.sampled_from(["", "expandable_segments:True"])))
    made = [world.allocate(size) for size in draw(sizes)]
    gone = draw(st.lists(st.sampled_from(range(len(made))), unique=True))
    world.free([made[index] for index in gone])
    return world.device.layout()


def pages_in_use(layout: DeviceLayout) -> tuple[set[int], int]:
    """First bytes of the units (segments or pages) with something alive, and the bytes of those units."""
    units: set[int] = set()
    total = 0
    for index, place in enumerate(layout.places):
        page = place.size
        if place.expandable:
            page = SMALL_SEGMENT if place.small else LARGE_SEGMENT
        for start in range(place.address, place.address + place.size, page):
            blocks = range(int(layout.first[index]), int(layout.first[index + 1]))
            if any(
                layout.state[block] != FREE
                and layout.address[block] < start + page
                and layout.address[block] + layout.size[block] > start
                for block in blocks
            ):
                units.add(start)
                total += page
    return units, total


@given(layouts())
def test_islands_and_full_segments_are_what_is_in_use(layout: DeviceLayout) -> None:
    islands = islands_of(layout)
    units, total = pages_in_use(layout)
    live = int(layout.size[layout.state != FREE].sum())
    assert sum(island.stranded for island in islands) == total - live
    assert all(island.stranded > 0 and island.live > 0 for island in islands)
    assert all(island.start in units for island in islands)
    blocks = [block for island in islands for block in island.blocks]
    assert len(set(blocks)) == len(blocks)


@given(layouts())
def test_an_island_holds_its_blocks_and_its_holes_touch_it(layout: DeviceLayout) -> None:
    for island in islands_of(layout):
        assert sum(int(layout.size[block]) for block in island.blocks) == island.live
        assert all(
            island.start <= layout.address[block] and layout.address[block] + layout.size[block] <= island.end
            for block in island.blocks
        )
        holes = list(zip(*(column.tolist() for column in holes_of(layout, [island])), strict=True))
        assert all(address < island.end and address + size > island.start for address, size in holes) or (
            island.place.expandable
        )
        if not island.place.expandable:
            assert (
                sum(min(address + size, island.end) - max(address, island.start) for address, size in holes)
                == island.stranded
            )


@given(layouts(), st.integers(0, 4 * MIB))
def test_holes_of_several_islands_come_once_and_none_is_too_small(layout: DeviceLayout, least: int) -> None:
    islands = islands_of(layout)
    addresses, sizes = holes_of(layout, islands, least)
    expected = {
        address: size
        for island in islands
        for address, size in zip(*(column.tolist() for column in holes_of(layout, [island])), strict=True)
        if size >= least
    }
    assert dict(zip(addresses.tolist(), sizes.tolist(), strict=True)) == expected
    assert len(addresses) == len(expected)
    assert not len(holes_of(layout, [])[0])
