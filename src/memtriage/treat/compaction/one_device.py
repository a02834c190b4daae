"""Compaction of one device, real or simulated: look, plan, move, in this order."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtriage.model.blocks import DEFAULT_POOL
from memtriage.treat.compaction.driver_thread import DriverThread
from memtriage.treat.compaction.islands import Island, islands_of
from memtriage.treat.compaction.move import Mover, Prepared
from memtriage.treat.compaction.plan import Movable, make_plan, tolerated
from memtriage.treat.compaction.result import DeviceCompaction, NotMoved
from memtriage.treat.device.protocol import AWAITING, Device, DeviceLayout, Use
from memtriage.treat.device.simulated import simulate

PRIVATE: Final = "in a private pool (of a CUDA graph or a MemPool)"
REGISTERED: Final = "registered with a communication library by its address"
IN_FLIGHT: Final = "freed, but a stream that uses it has not finished"

Find = Callable[[DeviceLayout, Sequence[int]], Movable]
"""Finds the storages of blocks; may be called again for other blocks."""
StorageSearch = Callable[[], AbstractContextManager[Find]]
"""Lists the storages that exist when it is entered; on exit the list is released."""


def compact_device(device: Device, search: StorageSearch) -> DeviceCompaction:
    """Look, plan, move, and return the freed memory.

    Raises:
        CompactionError: values are in the error.
        BaseException: what an operation raised; values are in place.
    """
    began = time.perf_counter()
    before = device.use()
    with device.entered():
        device.synchronize()
        if before.reserved - before.allocated <= tolerated(before.allocated):
            device.empty_cache()
            use = device.use()
            return DeviceCompaction(device.name, before, use, use, seconds=time.perf_counter() - began)
        # Before the snapshot is taken: its objects would have to be searched, too.
        with search() as find:
            return _compact(device, find, before, began)


def _compact(device: Device, find: Find, before: Use, began: float) -> DeviceCompaction:
    """Compact a device that has more cached memory than is tolerated."""
    read = device.snapshot()
    movable, prepared = Movable(), Prepared(device)
    try:
        driver = DriverThread(prepared)
        try:
            # What follows keeps the interpreter busy for long: wait until the driver has begun its work.
            driver.started.wait()
            layout = read()
            survey = look(layout)
            # A draft in case all can move: the driver makes room while storages are searched.
            plan = draft = make_plan(layout, survey.open, None, before.allocated)
            driver.make_bins(layout, draft)
            if draft.groups:
                movable = find(layout, draft.blocks)
            if movable.reasons:
                # Some must stay, so all others must be searched, too.
                rest = find(layout, survey.unasked(layout, draft.blocks))
                movable.storages.update(rest.storages)
                movable.reasons.update(rest.reasons)
                plan = make_plan(layout, survey.open, movable.storages.keys(), before.allocated)
            mover = Mover(device, layout, movable.storages, prepared, driver.emptying.set)
            mover.prepare(plan)
            driver.move(plan, mover)
            # The rest of this thread's work is done while the driver frees segments.
            driver.emptying.wait()
            del read
            if draft.groups and plan is draft:
                movable.reasons.update(find(layout, survey.unasked(layout, draft.blocks)).reasons)
            refused, freed = survey.refusals(layout, movable.reasons), plan.freed
            driver.moved.wait()
            movable.storages.clear()
            del layout, survey, draft, plan, mover
        finally:
            moved, stopped = driver.finish()
    finally:
        prepared.drop()
    after = device.use()
    return DeviceCompaction(
        device=device.name,
        before=before,
        predicted=Use(after.allocated, prepared.reserved - freed),
        after=after,
        moved=moved.bytes,
        storages=moved.storages,
        through_host=moved.through_host,
        refused=refused,
        stopped=stopped,
        seconds=time.perf_counter() - began,
    )


def predict_device(device: Device, search: StorageSearch) -> DeviceCompaction:
    """Compact a simulated device with the same layout, and return the result."""
    began = time.perf_counter()
    before = device.use()
    with device.entered():
        twin, twins = simulate(device.layout(), device.available())

    @contextmanager
    def twin_search() -> Iterator[Find]:
        with search() as find:

            def find_twins(layout: DeviceLayout, blocks: Sequence[int]) -> Movable:
                # Both devices have their blocks at the same addresses.
                movable = find(layout, blocks)
                return Movable(
                    {block: twins[int(layout.address[block])] for block in movable.storages}, movable.reasons
                )

            yield find_twins

    result = compact_device(twin, twin_search)
    seconds = time.perf_counter() - began
    assert result.after is not None
    return replace(
        result, device=device.name, before=before, predicted=result.after, after=None, seconds=seconds
    )


@dataclass(frozen=True, slots=True)
class Survey:
    """The islands of a device, before their storages are searched.

    Attributes:
        islands: all.
        fixed: why nothing in an island may move, by the island's start.
        open: the islands without such a reason.
    """

    islands: list[Island]
    fixed: dict[int, str]
    open: list[Island]

    def unasked(self, layout: DeviceLayout, known: Iterable[int]) -> list[int]:
        """Return the blocks of open islands whose storages have not been searched.

        Freed blocks that await a stream no longer have a storage.
        """
        excluded = self._waiting(layout).union(known)
        return [block for island in self.open for block in island.blocks if block not in excluded]

    def refusals(self, layout: DeviceLayout, reasons: Mapping[int, str]) -> tuple[NotMoved, ...]:
        """Return one row per reason. Stranded bytes count once, for the reason with most of the island."""
        reasons = {**reasons, **dict.fromkeys(self._waiting(layout), IN_FLIGHT)}
        if not self.fixed and not reasons:
            return ()
        rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for island in self.islands:
            live_bytes: dict[str, int] = defaultdict(int)
            for block in island.blocks:
                reason = self.fixed.get(island.start) or reasons.get(block)
                if reason is not None:
                    live_bytes[reason] += int(layout.size[block])
                    rows[reason][1] += 1
            for reason, nbytes in live_bytes.items():
                rows[reason][0] += nbytes
            if live_bytes:
                rows[max(live_bytes, key=live_bytes.__getitem__)][2] += island.stranded
        refused = [
            NotMoved(reason, live, count, stranded) for reason, (live, count, stranded) in rows.items()
        ]
        return tuple(sorted(refused, key=lambda row: (-row.stranded, row.reason)))

    def _waiting(self, layout: DeviceLayout) -> set[int]:
        return set(np.flatnonzero(layout.state == AWAITING).tolist())


def look(layout: DeviceLayout) -> Survey:
    """Find the islands of a device, and those that must not be touched."""
    islands = islands_of(layout)
    fixed = {island.start: reason for island in islands if (reason := _fixed(island)) is not None}
    return Survey(islands, fixed, [island for island in islands if island.start not in fixed])


def _fixed(island: Island) -> str | None:
    """Return why nothing in an island may move, whatever its storages; None if they may."""
    if island.place.pool != DEFAULT_POOL:
        return PRIVATE
    return REGISTERED if island.place.registered else None
