"""Decide which storages move, how, and what that frees. Pure: from a layout and what is movable to a plan.

Islands (see `islands`) are emptied in order of stranded bytes per byte moved. There are two ways:

*direct*, for few and large blocks. `resize_` to the same size allocates, copies and frees, one storage at a
time. To control where it allocates, the holes of islands to be emptied are held meanwhile.

*scratch*, for everything else. There are thousands of small blocks, and best fit would put each back into the
hole that it came from. So they are copied out in one launch, all released, and allocated again, packed. The
densest islands of small blocks stay, and take in what they have room for.

In the large pool both go to *bins*: segments of exactly the size of their blocks, which best fit then splits
without waste.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from memtriage.allocator.settings import (
    OWN_SEGMENT,
    SEGMENT_STEP,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    AllocatorSettings,
)
from memtriage.model.units import GIB, MIB
from memtriage.treat.compaction.islands import Island, holes_of
from memtriage.treat.device.protocol import AWAITING, DeviceLayout, Storage

LEFT_SHARE: Final = 0.01
LEFT_BYTES: Final = 32 * MIB
"""Stranded bytes that may stay: this share of what is allocated, and this much."""
LEAST_RATIO: Final = 0.02
"""Moving is not worth it for fewer stranded bytes per byte moved."""
FILL: Final = 0.9
"""Share of the room in holes that small blocks are assumed to fill."""
FILL_SHARE: Final = 0.75
"""Share of what may stay that small blocks may claim for holes that they do not fill."""
BIN: Final = GIB
"""Largest bin. A bin only returns to the driver when all its blocks are freed, so it should not be huge."""

DIRECT_FROM: Final = 8 * MIB
"""Blocks of at least this mean size move one by one: a separate copy then runs near the full rate."""

Way = Literal["direct", "scratch"]


@dataclass(frozen=True, slots=True)
class Bin:
    """A segment to make, and its blocks.

    Attributes:
        size: bytes to request; 0 if the blocks find room without a new segment.
        blocks: indices in the layout, in the order in which to allocate them.
    """

    size: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The part of a plan that concerns one stream and size class.

    Attributes:
        way: how the storages move.
        stream: handle of the stream of their allocations.
        expandable: new memory comes from expandable segments.
        islands: the islands to empty.
        bins: the blocks to move, biggest first.
        small: of the small pool.
    """

    way: Way
    stream: int
    expandable: bool
    islands: tuple[Island, ...]
    bins: tuple[Bin, ...]
    small: bool

    @property
    def blocks(self) -> list[int]:
        """Indices of all blocks to move, in the order in which to allocate them."""
        return [block for target in self.bins for block in target.blocks]


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """What to do.

    Attributes:
        groups: in the order in which to do them.
        freed: bytes of the emptied islands, less what their blocks will need again.
    """

    groups: tuple[Group, ...] = ()
    freed: int = 0

    @property
    def blocks(self) -> list[int]:
        """Indices of all blocks to move."""
        return [block for group in self.groups for block in group.blocks]


@dataclass(slots=True)
class Movable:
    """What may move, and why the rest may not. It holds the storages: drop it when done.

    Attributes:
        storages: by index of their block in a layout.
        reasons: why a block may not move, by its index.
    """

    storages: dict[int, Storage] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)


def tolerated(allocated: int) -> int:
    """Stranded bytes that may stay."""
    return int(LEFT_SHARE * allocated) + LEFT_BYTES


def make_plan(
    layout: DeviceLayout,
    islands: Iterable[Island],
    movable: Collection[int] | None,
    allocated: int,
    bin_limit: int = BIN,
) -> CompactionPlan:
    """Make a plan.

    Args:
        islands: the layout's islands in default pools.
        movable: indices of the blocks that may be moved; None for all that are in use. If an island has any
            other live block, it stays.
    """
    able = _able(layout, islands, movable)
    kinds: dict[tuple[int, bool], list[Island]] = defaultdict(list)
    for island in able:
        kinds[island.place.stream, island.place.small].append(island)
    chosen: list[Island] = []
    left = tolerated(allocated)
    for number, (kind, group) in enumerate(sorted(kinds.items(), key=lambda item: not item[0][1])):
        kinds[kind], stays = _worst(group, layout.settings, left // (len(kinds) - number), left)
        left = max(0, left - stays)
        chosen += kinds[kind]
    staying = _holes_of_the_rest(layout, islands, chosen)
    plans = [
        _plan_kind(layout, group, staying[kind], bin_limit)
        for kind, group in sorted(kinds.items(), key=lambda item: (not item[0][1], item[0][0]))
        if group
    ]
    worth = [(group, freed) for group, freed in plans if freed >= SMALL_SEGMENT]
    groups = tuple(group for group, _ in worth)
    return CompactionPlan(
        groups=groups,
        freed=sum(freed for _, freed in worth),
    )


def _able(layout: DeviceLayout, islands: Iterable[Island], movable: Collection[int] | None) -> list[Island]:
    """Islands in which all blocks may be moved."""
    if movable is None:
        # Few, if any, await a stream.
        hindered = frozenset(np.flatnonzero(layout.state == AWAITING).tolist())
        return (
            [island for island in islands if hindered.isdisjoint(island.blocks)]
            if hindered
            else list(islands)
        )
    allowed = frozenset(movable)
    return [island for island in islands if allowed.issuperset(island.blocks)]


def _worst(
    islands: list[Island], settings: AllocatorSettings, share: int, most: int
) -> tuple[list[Island], int]:
    """Islands of one stream and size class to empty, those with most stranded bytes per live byte first.

    Small blocks fit into the holes of islands that stay: then only as many islands are emptied as those have
    room for, and the densest stay untouched.

    Args:
        share: stranded bytes that may stay in these islands.
        most: stranded bytes that may still stay in total.

    Returns:
        The islands, and the bytes that will remain stranded.
    """
    islands = sorted(islands, key=lambda island: (-island.stranded / island.live, island.start))
    left = sum(island.stranded for island in islands)
    room = sum(island.end - island.start for island in islands)
    live = room - left
    least = int(live / FILL)
    fills = islands[0].place.small and not (settings.expandable_segments or islands[0].place.expandable)
    if fills and least - live <= max(share, FILL_SHARE * most):
        for count, island in enumerate(islands):
            size = island.end - island.start
            if left <= share or room - size < least:
                return islands[:count], left
            room, left = room - size, left - size
        return islands, left
    for count, island in enumerate(islands):
        if left <= share or island.stranded < LEAST_RATIO * island.live:
            return islands[:count], left
        left -= island.stranded
    return islands, left


def _holes_of_the_rest(
    layout: DeviceLayout, islands: Iterable[Island], chosen: Sequence[Island]
) -> dict[tuple[int, bool], list[int]]:
    """Sizes of the holes that stay, by stream and size class."""
    going = {island.start for island in chosen}
    rest: dict[tuple[int, bool], list[Island]] = defaultdict(list)
    for island in islands:
        if island.start not in going:
            rest[island.place.stream, island.place.small].append(island)
    holes = {kind: holes_of(layout, staying)[1].tolist() for kind, staying in rest.items()}
    return defaultdict(list, holes)


def _plan_kind(
    layout: DeviceLayout, islands: Sequence[Island], holes: list[int], bin_limit: int
) -> tuple[Group, int]:
    """The group of one stream and size class, and the bytes that it frees."""
    settings = layout.settings
    place = islands[0].place
    blocks, sizes = by_size(layout, [block for island in islands for block in island.blocks])
    total = sum(sizes)
    expandable = settings.expandable_segments or any(island.place.expandable for island in islands)
    if place.small or expandable:
        bins = [Bin(0, tuple(blocks))]
        page = SMALL_SEGMENT if place.small else settings.large_segment_size
        # Small blocks fit into most holes; the pages of expandable segments are counted again.
        room = 0 if expandable else sum(holes)
        needed = -(-max(0, total - room) // page) * page
        way: Way = "scratch"
    else:
        bins = _bins(blocks, sizes, holes, settings, bin_limit)
        needed = sum(
            settings.segment_size(settings.round_size(target.size)) for target in bins if target.size
        )
        way = "direct" if total >= DIRECT_FROM * len(blocks) else "scratch"
    freed = sum(island.end - island.start for island in islands) - needed
    group = Group(
        way=way,
        stream=place.stream,
        expandable=expandable,
        islands=tuple(islands),
        bins=tuple(bins),
        small=place.small,
    )
    return group, freed


def _bins(
    blocks: Sequence[int], sizes: Sequence[int], holes: Iterable[int], settings: AllocatorSettings, limit: int
) -> list[Bin]:
    """The blocks that fit into holes that stay, then bins for the rest."""
    most = settings.max_split_size
    if most is not None:
        limit = min(limit, most - SEGMENT_STEP)
    free = sorted(holes)
    fillers: list[int] = []
    bins: list[Bin] = []
    run: list[int] = []
    total = 0
    for block, size in zip(blocks, sizes, strict=True):
        if most is not None and size >= most:
            bins.append(Bin(size, (block,)))
        elif _take_hole(free, size, most):
            fillers.append(block)
        else:
            if run and total + size > limit:
                bins.append(Bin(max(total, OWN_SEGMENT), tuple(run)))
                run, total = [], 0
            run.append(block)
            total += size
    if run:
        bins.append(Bin(max(total, OWN_SEGMENT), tuple(run)))
    return ([Bin(0, tuple(fillers))] if fillers else []) + bins


def _take_hole(free: list[int], size: int, most: int | None) -> bool:
    """Best fit among holes of the large pool (`get_free_block`, `should_split`); cuts the hole if it fits."""
    at = bisect_left(free, size)
    if at == len(free) or (most is not None and free[at] >= most):
        return False
    rest = free.pop(at) - size
    if rest > SMALL_LIMIT:
        insort(free, rest)
    return True


def by_size(layout: DeviceLayout, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Blocks and the sizes that they need, the biggest first, so that the last ones fill what is left."""
    index = np.array(blocks, np.int64)
    needs = layout.needs_of(index)
    order = np.lexsort((index, -needs))
    return index[order].tolist(), needs[order].tolist()


def bins_for(layout: DeviceLayout, blocks: Sequence[int], sizes: Sequence[int]) -> list[Bin]:
    """Bins for blocks of the large pool, without using holes."""
    return _bins(blocks, sizes, (), layout.settings, BIN)
