"""glibc's malloc as far as it decides how much memory stays resident: what it maps, splits, keeps and trims.

After `malloc/malloc.c` of glibc 2.36. One arena and large chunks only: caches of small chunks (tcache, fast
bins) hold some KiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

_PAGE: Final = 4096
_HEADER: Final = 16
"""Bytes of a chunk's header, with its alignment."""
_ALIGNMENT: Final = 64
"""Of torch's tensors on the host (c10/core/alignment.h)."""
_TOP_PAD: Final = 128 << 10
_LOWEST_THRESHOLD: Final = 128 << 10
_HIGHEST_THRESHOLD: Final = 32 << 20
_CONSOLIDATES: Final = 64 << 10
"""A freed chunk of this size or more has the top trimmed (FASTBIN_CONSOLIDATION_THRESHOLD)."""
_SMALLEST_REST: Final = 32


class Malloc:
    """The heap of a process. Sizes are bytes.

    Attributes:
        resident: bytes of pages that were touched and not returned.
        in_use: bytes that the program has allocated.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self._mapped: dict[int, int] = {}  # size by block
        self._mapped_bytes = 0
        self._chunks: dict[int, tuple[int, int]] = {}  # address and size by block
        self._free_at: dict[int, int] = {}  # size of free chunks by address
        self._free_to: dict[int, int] = {}  # their address by end
        self._by_size: list[tuple[int, int]] = []
        self._top = 0  # where the part of the heap begins that was never allocated or is free again
        self._end = 0  # of the heap
        self._touched = 0  # end of the highest part that was in use since the heap was trimmed
        self._threshold = _LOWEST_THRESHOLD
        self._trim_above = 2 * _LOWEST_THRESHOLD

    @property
    def resident(self) -> int:
        return self._mapped_bytes + self._touched

    def malloc(self, block: int, size: int) -> None:
        """Allocate a block, which the program fills."""
        self.in_use += size
        wanted = _rounded(size + _HEADER + _ALIGNMENT, 16)
        address = self._found(wanted)
        if address is None and self._end - self._top < wanted + _SMALLEST_REST:
            if wanted >= self._threshold:
                self._mapped[block] = _rounded(wanted, _PAGE)
                self._mapped_bytes += self._mapped[block]
                return
            self._end = _rounded(self._top + wanted + _TOP_PAD + _SMALLEST_REST, _PAGE)
        if address is None:
            address = self._top
            self._top += wanted
            self._touched = max(self._touched, self._top)
        self._chunks[block] = (address, wanted)

    def free(self, block: int, size: int) -> None:
        """Free a block of this size."""
        self.in_use -= size
        mapped = self._mapped.pop(block, None)
        if mapped is not None:
            self._mapped_bytes -= mapped
            if self._threshold < mapped <= _HIGHEST_THRESHOLD:
                self._threshold, self._trim_above = mapped, 2 * mapped
            return
        address, length = self._chunks.pop(block)
        end = address + length
        if end in self._free_at:
            end += self._take(end)
        if address in self._free_to:
            address -= self._take(self._free_to[address])
        if end == self._top:
            self._top = address
        else:
            self._keep(address, end - address)
        if end - address >= _CONSOLIDATES and self._end - self._top >= self._trim_above:
            self._end = _rounded(self._top + _TOP_PAD + _SMALLEST_REST, _PAGE)
            self._touched = min(self._touched, self._end)

    def _found(self, wanted: int) -> int | None:
        """The address of the smallest free chunk that is large enough, without what is left of it."""
        position = bisect_left(self._by_size, (wanted, 0))
        if position == len(self._by_size):
            return None
        size, address = self._by_size[position]
        self._take(address)
        if size > wanted:
            self._keep(address + wanted, size - wanted)
        return address

    def _keep(self, address: int, size: int) -> None:
        self._free_at[address] = size
        self._free_to[address + size] = address
        insort(self._by_size, (size, address))

    def _take(self, address: int) -> int:
        """Take a chunk from the free ones; its size."""
        size = self._free_at.pop(address)
        del self._free_to[address + size]
        del self._by_size[bisect_left(self._by_size, (size, address))]
        return size


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
