"""Make the bins of a plan, and carry it out on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from memtriage.allocator.settings import SEGMENT_STEP
from memtriage.model.blocks import DEFAULT_POOL
from memtriage.model.units import MIB
from memtriage.treat.compaction.holds import Holds, release_all
from memtriage.treat.compaction.islands import Island
from memtriage.treat.compaction.plan import Bin, CompactionPlan, Group, bins_for, by_size
from memtriage.treat.compaction.relocate import MoveBatch, OnHost, Relocation
from memtriage.treat.device.protocol import FREE, OUT_OF_MEMORY, Device, DeviceLayout, Storage

SPARE: Final = 64 * MIB
"""Device memory that stays free: libraries take some without the allocator."""

Bins = dict[tuple[int, int], int]
"""Addresses of held bins, by index of the group in the plan and of the bin in the group."""


@dataclass(slots=True)
class Prepared:
    """Bins that are held for a plan; each must be released once.

    Attributes:
        device: their device.
        reserved: bytes of segments after free memory was returned, and before any bin was made.
        bins: the held bins.
    """

    device: Device
    reserved: int = 0
    bins: Bins = field(default_factory=dict)

    def take(self, group: int, index: int) -> int | None:
        """Pass a bin to the caller: its address; None if there is none."""
        return self.bins.pop((group, index), None)

    def drop(self) -> None:
        """Release the bins that were not taken."""
        addresses = list(self.bins.values())
        self.bins.clear()
        release_all(self.device, addresses)


def make_bins(prepared: Prepared, layout: DeviceLayout, plan: CompactionPlan) -> None:
    """Make all bins if there is memory for all at once.

    Done while the storages are searched: both take about equally long, and this does not need Python.
    """
    wanted = sum(target.size for group in plan.groups for target in group.bins)
    # A scratch copy takes the same amount.
    if wanted == 0 or prepared.device.available() < 2 * wanted + SPARE:
        return
    try:
        for number, group in enumerate(plan.groups):
            _make_bins(prepared, layout, number, group)
    except BaseException as error:
        prepared.drop()
        if not isinstance(error, OUT_OF_MEMORY):
            raise


def _make_bins(prepared: Prepared, layout: DeviceLayout, number: int, group: Group) -> None:
    sizes = {index: target.size for index, target in enumerate(group.bins) if target.size}
    if not sizes:
        return
    with Holds(prepared.device, group.stream, layout.settings) as holds:
        # A bin in an island that should be emptied would pin it.
        holds.take_holes(layout, group.islands, at_least=min(sizes.values()))
        for index, size in sizes.items():
            prepared.bins[number, index] = prepared.device.allocate(size, group.stream)


Moving = tuple[MoveBatch, int]
"""Storages, and the bytes of their blocks."""


@dataclass(slots=True)
class MoveProgress:
    """What was done so far.

    Attributes:
        bytes, storages: what was moved, each counted once.
        through_host: the part of `bytes` that went through host memory.
    """

    bytes: int = 0
    storages: int = 0
    through_host: int = 0


class Mover:
    """Moves storages of one device.

    Args:
        layout: the layout that the plan was made from.
        storages: of the blocks to move, by index in the layout.
        emptying: called when the driver is about to free emptied segments, which may take long.
    """

    def __init__(
        self,
        device: Device,
        layout: DeviceLayout,
        storages: Mapping[int, Storage],
        prepared: Prepared,
        emptying: Callable[[], None],
    ) -> None:
        self._device = device
        self._layout = layout
        self._storages = storages
        self._prepared = prepared
        self._emptying = emptying
        self._ready: dict[int, Moving] = {}
        self.moved = MoveProgress()

    def prepare(self, plan: CompactionPlan) -> None:
        """Call this before `run`, in any thread: it does not use the device."""
        for number, group in enumerate(plan.groups):
            if group.way == "scratch":
                self._ready[number] = self._moving(group.blocks)

    def run(self, plan: CompactionPlan) -> None:
        """Move all groups; the caller empties the cache.

        Raises:
            CompactionError: see there.
            BaseException: whatever an operation raised; every storage has its values.
        """
        for index, group in enumerate(plan.groups):
            if group.way == "direct":
                if index:
                    # Storages of this group must not be allocated in the previous group's scratch.
                    self._device.empty_cache()
                self._direct(index, group)
            elif sum(island.live for island in group.islands) <= self._device.available() - SPARE:
                self._relocate(group, group.islands, self._ready[index], group.bins, number=index)
            else:
                self._in_batches(group, group.islands)

    # One by one, to where they are steered.

    def _direct(self, number: int, group: Group) -> None:
        left: set[int] = set()
        with Holds(self._device, group.stream, self._layout.settings) as holds:
            holds.take_holes(self._layout, group.islands)
            for index, target in enumerate(group.bins):
                if not self._open_bin(number, group, index, holds):
                    left.update(target.blocks)
                    continue
                left.update(self._move_into(group, target, holds))
        if left:
            self._device.synchronize()
            self._device.empty_cache()
            self._in_batches(group, [island for island in group.islands if left.intersection(island.blocks)])

    def _move_into(self, group: Group, one: Bin, holds: Holds) -> Sequence[int]:
        """Move a bin's blocks; return those for which there was no room."""
        storages = list(map(self._storages.__getitem__, one.blocks))
        index = np.array(one.blocks, np.int64)
        addresses, sizes = self._layout.address[index].tolist(), self._layout.size[index].tolist()
        moved = 0
        try:
            # The loop should take no longer than the copies, which run meanwhile.
            for storage, address, size in zip(storages, addresses, sizes, strict=True):
                self._device.resize((storage,), (storage.nbytes(),), group.stream)
                moved += 1
                # The next block must not be allocated where this one was.
                holds.take(address, size)
        except OUT_OF_MEMORY:
            pass
        finally:
            self._count(moved, sum(sizes[:moved]))
        return one.blocks[moved:]

    def _open_bin(self, number: int, group: Group, index: int, holds: Holds) -> bool:
        """Make a free block of the bin's size; False if there is no memory for it."""
        size = group.bins[index].size
        address = self._prepared.take(number, index)
        if address is not None:
            self._device.release(address)
            return True
        if size == 0:
            return True
        if self._device.available() < size + SPARE:
            holds.let_go(self._emptied(group))
            self._device.synchronize()
            self._device.empty_cache()
            if self._device.available() < size + SPARE:
                return False
        return self._reserve(size, group.stream)

    def _emptied(self, group: Group) -> list[Island]:
        """Islands whose storages have all left."""
        return [island for island in group.islands if all(map(self._has_left, island.blocks))]

    def _has_left(self, block: int) -> bool:
        return self._storages[block].data_ptr() != int(self._layout.address[block])

    def _reserve(self, size: int, stream: int) -> bool:
        try:
            self._device.release(self._device.allocate(size, stream))
        except OUT_OF_MEMORY:
            return False
        return True

    # Together, by way of a copy.

    def _in_batches(self, group: Group, islands: Sequence[Island]) -> None:
        """Move as many islands at a time as fit into a copy on the device; the rest goes through the host."""
        room = self._room(group)
        batches = list(_batches(islands, room))
        for at, batch in enumerate(batches):
            # Some may have moved directly before memory ran out.
            blocks = [block for island in batch for block in island.blocks if not self._has_left(block)]
            if not blocks:
                continue
            blocks, sizes = by_size(self._layout, blocks)
            with Holds(self._device, group.stream, self._layout.settings) as holds:
                holds.take_holes(self._layout, [island for later in batches[at + 1 :] for island in later])
                bins = bins_for(self._layout, blocks, sizes)
                self._relocate(group, batch, self._moving(blocks), bins, on_host=sum(sizes) > room)

    def _relocate(
        self,
        group: Group,
        islands: Sequence[Island],
        moving: Moving,
        bins: Sequence[Bin],
        *,
        number: int | None = None,
        on_host: bool = False,
    ) -> None:
        """Empty whole islands and fill their storages elsewhere.

        Args:
            moving: their storages, in the order in which to allocate them.
            number: the group's number in the plan, if some of its bins may have been made.
        """
        batch, nbytes = moving
        storages, sizes = batch.storages, batch.sizes
        with Holds(self._device, group.stream, self._layout.settings) as holds:
            # A copy in a segment that should be freed would pin it. An expandable segment also grows from any
            # hole at its end.
            if not group.small:
                holds.take_holes(self._layout, islands, at_least=0 if group.expandable else sum(sizes))
            relocation = self._relocation(group, batch, on_host)

        def refill() -> None:
            self._emptying()
            self._device.empty_cache()
            if group.expandable:
                return
            done = 0
            for index, target in enumerate(bins):
                made = self._prepared.take(number, index) if number is not None else None
                if made is not None:
                    self._device.release(made)
                elif target.size:
                    self._reserve(target.size, group.stream)
                until = done + len(target.blocks)
                self._device.resize(storages[done:until], sizes[done:until], group.stream)
                done = until

        # Small ones: they are packed into the segments just emptied; the remaining segments are returned.
        relocation.run(None if group.small and not group.expandable else refill)
        self._count(len(storages), nbytes)
        if isinstance(relocation.keep, OnHost):
            self.moved.through_host += nbytes

    def _moving(self, blocks: Sequence[int]) -> Moving:
        index = np.array(blocks, np.int64)
        batch = MoveBatch(list(map(self._storages.__getitem__, blocks)), self._layout.address[index])
        return batch, int(self._layout.size[index].sum())

    def _relocation(self, group: Group, batch: MoveBatch, on_host: bool) -> Relocation:
        if not on_host:
            page = self._layout.settings.large_segment_size if group.expandable else SEGMENT_STEP
            with suppress(*OUT_OF_MEMORY):
                return Relocation(self._device, batch, group.stream, on_host=False, page=page)
        return Relocation(self._device, batch, group.stream, on_host=True)

    def _room(self, group: Group) -> int:
        """Bytes that a copy on the device may take: new memory, or the largest hole."""
        layout = self._layout
        holes = [
            int(layout.size[first:last][layout.state[first:last] == FREE].max(initial=0))
            for place, first, last in zip(layout.places, layout.first[:-1], layout.first[1:], strict=True)
            if place.stream == group.stream and not place.small and place.pool == DEFAULT_POOL
        ]
        return max([self._device.available() - SPARE, *holes])

    def _count(self, storages: int, nbytes: int) -> None:
        """Note what was moved."""
        self.moved.storages += storages
        self.moved.bytes += nbytes


def _batches(islands: Sequence[Island], room: int) -> Iterator[list[Island]]:
    """Batches of islands whose live bytes fit together; one that does not fit at all is a separate batch."""
    batch: list[Island] = []
    total = 0
    for island in islands:
        if batch and total + island.live > room:
            yield batch
            batch, total = [], 0
        batch.append(island)
        total += island.live
    if batch:
        yield batch
