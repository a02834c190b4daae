"""The caching allocator's units and the figures of a device: numbers and text, nothing that holds memory."""

from __future__ import annotations

from typing import Literal

import msgspec

BlockState = Literal["active", "awaiting", "free"]

DEFAULT_POOL: tuple[int, int] = (0, 0)
"""Id of the pool of ordinary allocations; any other id is a private pool (CUDA graph, `MemPool`)."""


class Block(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A part of a segment. Sizes in bytes.

    Attributes:
        address: first byte.
        size: what the block takes in its segment.
        requested: what was asked for, at most `size`; 0 for a free block.
        state: `active` (handed out), `awaiting` (freed, but a stream that used it has not passed that point
            yet) or `free` (cached).
        site: `file.py:line in function` of the allocation; None where no history was recorded.
    """

    address: int
    size: int
    requested: int
    state: BlockState
    site: str | None = None

    @property
    def end(self) -> int:
        """The first address after the block."""
        return self.address + self.size


class Segment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One allocation from the driver (of an expandable segment: one contiguous mapped range).

    Attributes:
        device: CUDA index.
        address, size: the range, in bytes.
        stream: handle of the stream whose allocations the segment serves; 0 is the default stream.
        pool: `DEFAULT_POOL`, or the id of a private pool.
        expandable: made of pages that are mapped and unmapped one by one.
        page: size of those pages in bytes; None for a segment that is not expandable.
        blocks: in order of address, without gaps.
    """

    device: int
    address: int
    size: int
    stream: int
    pool: tuple[int, int]
    expandable: bool
    blocks: tuple[Block, ...]
    page: int | None = None

    @property
    def end(self) -> int:
        """The first address after the segment."""
        return self.address + self.size


def pinned_block(nbytes: int) -> int:
    """Return the bytes of the page-locked block that torch allocates for a request: the next power of two.

    As `PowerOf2Ceil` of ATen/core/CachingHostAllocator.h; 0 for 0.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class DeviceCounters(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The allocator's counters of one device, in bytes but for `retries` and `ooms`.

    None where the allocator in use does not keep the figure (`cudaMallocAsync` reports zeros for most of
    them, a pluggable allocator keeps none).

    Attributes:
        allocated: bytes of live blocks.
        reserved: bytes of segments.
        requested: bytes asked for by live blocks.
        active: live blocks and those that await a stream.
        peak_allocated, peak_reserved: highest value since the statistics were last reset, by whomever.
        retries: failed driver allocations after which the cache was flushed and the allocation tried again.
        ooms: out-of-memory errors thrown.
        inactive_split: free bytes in segments that hold something else as well, so stranded bytes; expandable
            segments are left out (`free_block` in CUDACachingAllocator.cpp).
    """

    allocated: int | None = None
    reserved: int | None = None
    requested: int | None = None
    active: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    retries: int | None = None
    ooms: int | None = None
    inactive_split: int | None = None


class DriverUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver says of a device, in bytes.

    Attributes:
        total: the device's memory as CUDA sees it (of the MIG instance, where there is one).
        used: memory in use by anybody, `total` minus what is free.
        processes: the *other* processes on the device as (process id, bytes; None where the driver does not
            tell). When `own` is None this process may be among them under an id of another namespace.
        own: bytes of this process, its context included; None where the driver does not say.
        source: where the figures were read, and why some are missing.
    """

    total: int
    used: int
    processes: tuple[tuple[int, int | None], ...]
    own: int | None
    source: str
