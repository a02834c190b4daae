"""Holding free memory, so that what is allocated meanwhile goes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memtriage.treat.compact.islands import Island
from memtriage.treat.device.layout import Layout
from memtriage.treat.device.protocol import Device, is_out_of_memory

HOLD_TRIES: Final = 4
"""How many free blocks of one size are asked for until the one meant is among them."""


class Holds:
    """Free blocks of one stream that are held; `with` lets go of all of them."""

    def __init__(self, device: Device, stream: int) -> None:
        self._device = device
        self._stream = stream
        self._held: list[int] = []

    def take(self, address: int, size: int) -> None:
        """Hold the free block at an address, if best fit hands it out; it is free no more otherwise."""
        strays: list[int] = []
        try:
            for _ in range(HOLD_TRIES):
                try:
                    got = self._device.allocate(size, self._stream)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    return
                if got == address:
                    self._held.append(got)
                    return
                strays.append(got)
        finally:
            for stray in strays:
                self._device.release(stray)

    def take_holes(self, layout: Layout, island: Island, at_least: int = 0) -> None:
        """Hold the free blocks of an island, or those of at least some size."""
        for address, size in island.holes(layout):
            if size >= at_least:
                self.take(address, size)

    def let_go(self, islands: Sequence[Island]) -> None:
        """Release what lies in some islands."""
        for island in islands:
            inside = [address for address in self._held if island.start <= address < island.end]
            for address in inside:
                self._held.remove(address)
                self._device.release(address)

    def __enter__(self) -> Holds:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._held:
            self._device.release(self._held.pop())
