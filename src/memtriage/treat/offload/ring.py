"""The ring of pinned tiles, and the pipeline that runs over it: down, compute, up, each ahead of the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from memtriage.treat.offload.lanes import Lane
from memtriage.treat.offload.pinned import PinnedMemory, host_memory

_WORD = 4  # bytes of the widest element that travels, float32

Tile = TypeVar("Tile")


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


class Ring:
    """A few slots of pinned memory, and fp32 scratch for the tile that is computed.

    Attributes:
        elements: of a tile.
        gradient: scratch for a gradient as float32.
        moments: scratch for the two moments; empty unless they are kept in another type.
        slots: the room for tiles.
        pin_asked: whether page-locking was wanted.
        pinned: whether the slots are page-locked.
    """

    def __init__(self, elements: int, depth: int, *, pin: bool, moments: bool) -> None:
        """Raises MemoryError when the system refuses the memory."""
        self.elements = elements
        run = elements * _WORD
        self.pin_asked = pin
        self._memory = PinnedMemory(2 * depth * run, pin=pin)
        runs = self._memory.bytes.split(run)
        self.slots = [Slot(runs[2 * one], runs[2 * one + 1]) for one in range(depth)]
        self.gradient = host_memory(run).view(torch.float32)
        self.moments = [host_memory(run).view(torch.float32) for _ in range(2)] if moments else []

    @property
    def pinned(self) -> bool:
        return self._memory.pinned

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, pinned and not."""
        scratch = sum(one.nbytes for one in (self.gradient, *self.moments))
        return int(self._memory.bytes.nbytes + scratch)

    def run(
        self,
        tiles: Iterable[Tile],
        fetch: Callable[[Tile, Slot], None],
        finish: Callable[[Tile, Slot], None],
    ) -> None:
        """Take every tile through the ring: fetches run ahead, as far as there are slots.

        Args:
            tiles: in the order in which they are taken.
            fetch: starts what comes down into the slot.
            finish: waits for it, computes, starts what goes up.
        """
        under_way: deque[tuple[Tile, Slot]] = deque()
        free = deque(self.slots)
        for tile in tiles:
            if not free:
                ready, slot = under_way.popleft()
                finish(ready, slot)
                free.append(slot)
            slot = free.popleft()
            fetch(tile, slot)
            under_way.append((tile, slot))
        for ready, slot in under_way:
            finish(ready, slot)

    def close(self) -> None:
        """Wait for all copies, then give the page locks back. Repeatable."""
        for slot in self.slots:
            slot.arrived()
            slot.vacated()
        self._memory.close()
