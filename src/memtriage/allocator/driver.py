"""The GPU driver as the allocator sees it: whole segments, virtual ranges, pages.

Sizes and addresses in bytes.
"""

from __future__ import annotations

from typing import Final

TOP: Final = 0x7FFF_0000_0000
"""Below which the addresses of `Driver` lie: like those of a real one."""
ALIGNMENT: Final = 2 << 20
"""Granularity of the GPU's pages: what `cudaMalloc` rounds addresses of this size to."""


class Driver:
    """Hands out falling addresses until `capacity` bytes are in use.

    So do real ones, mostly (recorded on an H200); they also reuse what was given back. It matters in one
    place only: before torch 2.13 the allocator prefers, among free blocks of equal size, the lower address.
    Override `allocate` and `reserve` to give the addresses of a recording.

    Attributes:
        capacity: bytes that may be in use at once; None for no limit.
        used: bytes in use.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.used = 0
        self._lowest = TOP

    def allocate(self, size: int, stream: int, pool: tuple[int, int]) -> int | None:
        """A new segment's address; None when memory is out (`cudaMalloc`)."""
        return self.place(size) if self.take(size) else None

    def release(self, address: int, size: int) -> None:
        """Take a segment back (`cudaFree`)."""
        self.used -= size

    def reserve(self, size: int, stream: int, pool: tuple[int, int]) -> int:
        """The address of a new virtual range, which takes no memory (`cuMemAddressReserve`)."""
        return self.place(size)

    def map(self, address: int, size: int) -> bool:
        """Put memory behind a virtual range, all of it or nothing (`cuMemCreate` and `cuMemMap`)."""
        return self.take(size)

    def unmap(self, address: int, size: int) -> None:
        """Take the memory behind a virtual range back (`cuMemUnmap` and `cuMemRelease`)."""
        self.used -= size

    def take(self, size: int) -> bool:
        """Count `size` bytes as in use if they are there."""
        if self.capacity is not None and self.used + size > self.capacity:
            return False
        self.used += size
        return True

    def place(self, size: int) -> int:
        """The next free address."""
        self._lowest -= -(-size // ALIGNMENT) * ALIGNMENT
        return self._lowest
