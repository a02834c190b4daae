"""The ring of pinned tiles, and the pipeline that runs over it: down, compute, up, each ahead of the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from memtriage.treat.offload.lanes import Lane
from memtriage.treat.offload.pinned import PinnedMemory
from memtriage.treat.offload.tiles import room

_JOBS_AHEAD: Final = 2  # one that is computed, one that follows it at once

Tile = TypeVar("Tile")


class Job(Protocol):
    """The computation of a tile, in another thread; jobs are done in the order in which they are started."""

    def start(self) -> None:
        """Let it begin; once."""

    def wait(self) -> None:
        """Until it has ended, if it was started; raises what went wrong in it."""


class Slot:
    """Room for one tile in each direction, and the copies that are under way in it."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        self._down, self._up = down, up
        self._arrived: torch.cuda.Event | None = None
        self._left: torch.cuda.Event | None = None

    def down(self, dtype: torch.dtype) -> Tensor:
        """The tile on its way down, as elements of `dtype`."""
        return self._down.view(dtype)

    def up(self, dtype: torch.dtype) -> Tensor:
        """The tile on its way up, as elements of `dtype`."""
        return self._up.view(dtype)

    def fetch(self, lane: Lane, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Start copies from the device into parts of this slot's `down`."""
        with lane.down():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._arrived = lane.here()

    def send(self, lane: Lane, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Start copies from parts of this slot's `up` to the device."""
        with lane.up():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._left = lane.here()

    def arrived(self) -> None:
        """Wait until what was fetched is here."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    def vacated(self) -> None:
        """Wait until what was sent has left, so that `up` can be written again."""
        if self._left is not None:
            self._left.synchronize()
            self._left = None


@dataclass(slots=True)
class Spent:
    """Where the moving thread's time went, in seconds, summed over tiles.

    Attributes:
        arriving: waiting until a tile had come down.
        leaving: waiting until the one before it in the same slot had gone up.
        computing: waiting until a tile was computed; nearly all of it where the kernel sets the pace.
        total: all of `Ring.run`.
    """

    arriving: float = 0.0
    leaving: float = 0.0
    computing: float = 0.0
    total: float = 0.0


class Ring:
    """A few slots of pinned memory.

    Attributes:
        slots: the room for tiles.
        pin_asked: whether page-locking was wanted.
        pinned: whether the slots are page-locked.
        spent: since the ring was made, or since somebody put a new one there.
    """

    def __init__(self, elements: int, depth: int, *, pin: bool) -> None:
        """Take the memory for tiles of so many elements of two bytes, and half as many of four.

        Raises:
            MemoryError: when the system refuses it.
        """
        run = room(elements)
        self.pin_asked = pin
        self._memory = PinnedMemory(2 * depth * run, pin=pin)
        runs = self._memory.bytes.split(run)
        self.slots = [Slot(runs[2 * one], runs[2 * one + 1]) for one in range(depth)]
        self.spent = Spent()

    @property
    def pinned(self) -> bool:
        return self._memory.pinned

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return int(self._memory.bytes.nbytes)

    def run(
        self,
        tiles: Iterable[Tile],
        fetch: Callable[[Tile, Slot], None],
        prepare: Callable[[Tile, Slot], Job],
        finish: Callable[[Tile, Slot], None],
    ) -> None:
        """Take every tile through the ring: fetches run ahead, as far as there are slots.

        This thread only moves: launching copies takes as long as a good part of a tile's job.

        Args:
            tiles: in the order in which they are taken.
            fetch: starts what comes down into the slot.
            prepare: called when that has arrived and the slot's `up` is free; returns what is to be computed.
            finish: starts what goes up; called when the job is done.
        """
        began = perf_counter()
        arriving: deque[tuple[Tile, Slot]] = deque()
        computing: deque[tuple[Tile, Slot, Job]] = deque()
        free = deque(self.slots)

        def advance() -> None:
            """Hand jobs over, finish the oldest."""
            while arriving and len(computing) < _JOBS_AHEAD:
                tile, slot = arriving.popleft()
                self._await_copies(slot)
                job = prepare(tile, slot)
                computing.append((tile, slot, job))
                job.start()
            tile, slot, job = computing[0]
            self._await_job(job)
            computing.popleft()
            finish(tile, slot)
            free.append(slot)

        try:
            for tile in tiles:
                if not free:
                    advance()
                slot = free.popleft()
                fetch(tile, slot)
                arriving.append((tile, slot))
            while arriving or computing:
                advance()
        finally:
            # After a failure nothing may go on behind the back of whoever is told of it.
            for *_, job in computing:
                with suppress(Exception):
                    job.wait()
            self.spent.total += perf_counter() - began

    def _await_copies(self, slot: Slot) -> None:
        began = perf_counter()
        slot.arrived()
        between = perf_counter()
        slot.vacated()
        self.spent.arriving += between - began
        self.spent.leaving += perf_counter() - between

    def _await_job(self, job: Job) -> None:
        began = perf_counter()
        job.wait()
        self.spent.computing += perf_counter() - began

    def close(self) -> None:
        """Wait for all copies, then give the page locks back. Repeatable."""
        for slot in self.slots:
            slot.arrived()
            slot.vacated()
        self._memory.close()
