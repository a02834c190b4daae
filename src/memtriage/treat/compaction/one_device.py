"""Compaction of one device, real or simulated: look, plan, move, in this order."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Final

import numpy as np

from memtriage.model.blocks import DEFAULT_POOL
from memtriage.treat.compaction.islands import Island, islands_of
from memtriage.treat.compaction.move import SPARE, MoveProgress, Mover
from memtriage.treat.compaction.plan import CompactionPlan, Movable, make_plan, tolerated
from memtriage.treat.compaction.prepare import Prepared, give_back, make_bins
from memtriage.treat.compaction.result import DeviceCompaction, NotMoved
from memtriage.treat.device.background import BackgroundTask
from memtriage.treat.device.layout import AWAITING, DeviceLayout
from memtriage.treat.device.protocol import Device, Use, is_out_of_memory
from memtriage.treat.device.simulated import simulate

PRIVATE: Final = "in a private pool (of a CUDA graph or a MemPool)"
REGISTERED: Final = "registered with a communication library by its address"
IN_FLIGHT: Final = "freed, but a stream that uses it has not finished"


Find = Callable[[DeviceLayout, Sequence[int]], Movable]
"""Finds the storages of blocks; may be asked again for others."""
StorageSearch = Callable[[], AbstractContextManager[Find]]
"""Gets ready to find what there is from now on; leaving it lets go of all that."""
Draft = tuple[DeviceLayout, CompactionPlan]
"""What is to be done if all blocks can move."""
Job = tuple[CompactionPlan, Mover]
"""What is to be done, and what does it."""


def compact_device(device: Device, search: StorageSearch) -> DeviceCompaction:
    """Look, plan, move, and give back what that frees.

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
        # First of all: what a snapshot consists of would only be more objects to look through.
        with search() as find:
            return _compact(device, find, before, began)


def _compact(device: Device, find: Find, before: Use, began: float) -> DeviceCompaction:
    """All of it but for what there is nothing to do for."""
    read = device.snapshot()
    movable, prepared = Movable(), Prepared(device)
    stage = Stages()
    hopes: SimpleQueue[Draft | None] = SimpleQueue()
    orders: SimpleQueue[Job | None] = SimpleQueue()
    try:
        working = BackgroundTask(lambda: _work(prepared, stage, hopes, orders))
        try:
            # What follows holds the interpreter for long: not before the driver has begun its work.
            stage.under_way.wait()
            layout = read()
            sight = look(layout)
            plan = hoped = make_plan(layout, sight.open, None, before.allocated)
            hopes.put((layout, hoped))
            if hoped.groups:
                movable = find(layout, hoped.blocks)
            if movable.reasons:
                # Some must stay: now it matters what all others may do.
                rest = find(layout, sight.asked(layout, hoped.blocks))
                movable.storages.update(rest.storages)
                movable.reasons.update(rest.reasons)
                plan = make_plan(layout, sight.open, movable.storages.keys(), before.allocated)
            mover = Mover(device, layout, movable.storages, prepared, stage.emptying.set)
            mover.prepare(plan)
            orders.put((plan, mover))
            # What is left to do here is done while the driver works.
            stage.emptying.wait()
            del read
            if hoped.groups and plan is hoped:
                movable.reasons.update(find(layout, sight.asked(layout, hoped.blocks)).reasons)
            refused, freed = sight.refusals(layout, movable.reasons), plan.freed
            stage.leaving.wait()
            movable.storages.clear()
            del layout, sight, hoped, plan, mover
        finally:
            hopes.put(None)  # So that it ends, too, when this was cut short.
            orders.put(None)
            moved, stopped = working.result()
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
    """The same, on a simulated device of the same layout: what it would come to."""
    began = time.perf_counter()
    before = device.use()
    with device.entered():
        twin, twins = simulate(device.layout(), device.available())

    @contextmanager
    def twin_search() -> Iterator[Find]:
        with search() as find:

            def find_twins(layout: DeviceLayout, blocks: Sequence[int]) -> Movable:
                # Blocks are where they are on the real device: its storages are found by the twin's layout.
                found = find(layout, blocks)
                return Movable(
                    {block: twins[int(layout.address[block])] for block in found.storages}, found.reasons
                )

            yield find_twins

    done = compact_device(twin, twin_search)
    seconds = time.perf_counter() - began
    assert done.after is not None
    return replace(done, device=device.name, before=before, predicted=done.after, after=None, seconds=seconds)


@dataclass(frozen=True, slots=True)
class Stages:
    """How far the work beside has come. All are set when it has ended, too.

    Attributes:
        under_way: the driver's work begins.
        emptying: the driver is at work for long, moves under way or done.
        leaving: only the driver's work is left.
    """

    under_way: threading.Event = field(default_factory=threading.Event)
    emptying: threading.Event = field(default_factory=threading.Event)
    leaving: threading.Event = field(default_factory=threading.Event)


def _work(
    prepared: Prepared,
    stage: Stages,
    hopes: SimpleQueue[Draft | None],
    orders: SimpleQueue[Job | None],
) -> tuple[MoveProgress, str | None]:
    """All that the allocator is asked for, in one thread: what was moved, and why it ended early.

    Args:
        prepared: of the device.
        stage: told of the progress.
        hopes: gives what can be prepared while it is not known yet whose the blocks are; None for nothing.
        orders: gives what is to be done then; None for nothing.
    """
    try:
        # What the caller has entered does not hold in another thread.
        with prepared.device.entered():
            stage.under_way.set()
            give_back(prepared)
            hope = hopes.get()
            if hope is None:
                return MoveProgress(), None
            layout, hoped = hope
            make_bins(prepared, layout, hoped, SPARE)
            order = orders.get()
            if order is None:
                return MoveProgress(), None
            plan, mover = order
            if plan is not hoped:
                prepared.drop()
            stopped, moved, planned = _carried_out(plan, mover), mover.moved, bool(plan.groups)
            # The other thread takes all this apart while the driver works.
            del hope, layout, hoped, order, plan, mover
            if planned:
                _empty(prepared, stage)
            return moved, stopped
    finally:
        stage.under_way.set()
        stage.emptying.set()
        stage.leaving.set()


def _carried_out(plan: CompactionPlan, mover: Mover) -> str | None:
    """Why it ended early."""
    try:
        mover.run(plan)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return f"out of memory while moving: {error}"
    return None


def _empty(prepared: Prepared, stage: Stages) -> None:
    """Give back what the moves have freed."""
    prepared.drop()
    prepared.device.synchronize()
    stage.leaving.set()
    stage.emptying.set()  # last: what waits for it would hold the interpreter
    prepared.device.empty_cache()


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is on a device before anybody asks whose it is.

    Attributes:
        islands: all.
        fixed: why nothing of an island may move, by its start.
        open: the islands without such a reason.
    """

    islands: list[Island]
    fixed: dict[int, str]
    open: list[Island]

    def asked(self, layout: DeviceLayout, known: Iterable[int]) -> list[int]:
        """Blocks that are left to be asked for. Those that await a stream are nobody's any more."""
        out = self._waiting(layout).union(known)
        return [block for island in self.open for block in island.blocks if block not in out]

    def refusals(self, layout: DeviceLayout, reasons: Mapping[int, str]) -> tuple[NotMoved, ...]:
        """A row for each reason. Stranded bytes count once, for the reason that holds most of the island."""
        reasons = {**reasons, **dict.fromkeys(self._waiting(layout), IN_FLIGHT)}
        if not self.fixed and not reasons:
            return ()
        rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for island in self.islands:
            here: dict[str, int] = defaultdict(int)
            for block in island.blocks:
                reason = self.fixed.get(island.start) or reasons.get(block)
                if reason is not None:
                    here[reason] += int(layout.size[block])
                    rows[reason][1] += 1
            for reason, nbytes in here.items():
                rows[reason][0] += nbytes
            if here:
                rows[max(here, key=here.__getitem__)][2] += island.stranded
        refused = [
            NotMoved(reason, live, count, stranded) for reason, (live, count, stranded) in rows.items()
        ]
        return tuple(sorted(refused, key=lambda row: (-row.stranded, row.reason)))

    def _waiting(self, layout: DeviceLayout) -> set[int]:
        return set(np.flatnonzero(layout.state == AWAITING).tolist())


def look(layout: DeviceLayout) -> Survey:
    """The islands of a device, and which of them may not be touched."""
    islands = islands_of(layout)
    fixed = {island.start: reason for island in islands if (reason := _fixed(island)) is not None}
    return Survey(islands, fixed, [island for island in islands if island.start not in fixed])


def _fixed(island: Island) -> str | None:
    """Why nothing of an island may move, whatever its storages; None if it may."""
    if island.place.pool != DEFAULT_POOL:
        return PRIVATE
    return REGISTERED if island.place.registered else None
