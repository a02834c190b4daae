"""Hold free memory, so that allocations meanwhile go elsewhere."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from memtriage.allocator.settings import SMALL_LIMIT, AllocatorSettings
from memtriage.treat.compaction.islands import Island, holes_of
from memtriage.treat.device.protocol import OUT_OF_MEMORY, Device, DeviceLayout, divides

HOLD_TRIES: Final = 4
"""How many free blocks of one size are allocated to get a particular one."""


def largest_request(size: int, settings: AllocatorSettings) -> int:
    """The largest request that fits a free block of some size, considering that requests are rounded up."""
    if settings.round_size(size) <= size:
        return size
    return bisect_right(range(size), size, key=settings.round_size) - 1


def release_all(device: Device, addresses: list[int]) -> None:
    """Release blocks and forget them. A failure neither keeps other blocks nor hides a current error."""
    failures: list[BaseException] = []
    while addresses:
        try:
            device.release(addresses.pop())
        except BaseException as error:
            failures.append(error)
    if failures and sys.exception() is None:
        raise failures[0]


class Holds:
    """Free blocks of one stream that are held; `with` releases all of them."""

    def __init__(self, device: Device, stream: int, settings: AllocatorSettings) -> None:
        self._device = device
        self._stream = stream
        self._settings = settings
        self._plain = not divides(settings)
        self._held: list[int] = []

    def take(self, address: int, size: int) -> None:
        """Hold the free block at an address, if best fit returns it; otherwise it is no longer free."""
        while size > 0:
            # With plain rounding the sizes of blocks are requests: there is nothing to compute.
            asked = size if self._plain else largest_request(size, self._settings)
            if not self._took(address, asked):
                return
            taken = asked if self._plain else self._settings.round_size(asked)
            # The allocator leaves such a small rest with the block.
            if size - taken <= SMALL_LIMIT:
                return
            address, size = address + taken, size - taken

    def _took(self, address: int, size: int) -> bool:
        strays: list[int] = []
        try:
            for _ in range(HOLD_TRIES):
                try:
                    got = self._device.allocate(size, self._stream)
                except OUT_OF_MEMORY:
                    return False
                if got == address:
                    self._held.append(got)
                    return True
                strays.append(got)
        finally:
            if strays:
                release_all(self._device, strays)
        return False

    def take_holes(self, layout: DeviceLayout, islands: Sequence[Island], at_least: int = 0) -> None:
        """Hold the free blocks of islands that have at least some size."""
        addresses, sizes = holes_of(layout, islands, at_least)
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
            self.take(address, size)

    def let_go(self, islands: Sequence[Island]) -> None:
        """Release the held blocks in some islands."""
        for island in islands:
            inside = [address for address in self._held if island.start <= address < island.end]
            for address in inside:
                self._held.remove(address)
                self._device.release(address)

    def __enter__(self) -> Holds:
        return self

    def __exit__(self, *exception: object) -> None:
        release_all(self._device, self._held)
