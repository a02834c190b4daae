"""What remedies need from a device: its memory's layout, and the few operations that change it.

`CudaDevice` implements it on a GPU, `SimulatedDevice` on the allocator's simulator, for a dry run. Their
methods are described here.

Everything is by address: no tensor is made for a storage, so no version counter changes and no hook runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from memtriage.allocator.settings import MIN_BLOCK, SMALL_SEGMENT, AllocatorSettings
from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.recording import Int64s

FREE: Final = 0
ACTIVE: Final = 1
AWAITING: Final = 2
"""States of a block."""

_STATES: Final[Mapping[str, int]] = {
    "active_allocated": ACTIVE,
    "active_awaiting_free": AWAITING,
    "active_pending_free": AWAITING,
    "inactive": FREE,
}
_MODEL_STATES: Final[Mapping[str, int]] = {"active": ACTIVE, "awaiting": AWAITING, "free": FREE}


class SegmentPlace(NamedTuple):
    """A segment, without its blocks. A tuple: a frozen dataclass takes four times as long to make.

    Attributes:
        address, size: the range in bytes; for an expandable segment, one contiguous mapped range.
        stream, pool: the stream and pool that it serves.
        small: whether it is of the small pool.
        expandable: made of pages that are mapped one by one.
        registered: known to a communication library by its address (`registration_counter`).
    """

    address: int
    size: int
    stream: int
    pool: tuple[int, int]
    small: bool
    expandable: bool
    registered: bool = False


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """Segments and blocks of one device, in columns: tens of thousands are read in milliseconds.

    Attributes:
        places: the segments, by address.
        first: index of each segment's first block, and at the end the number of blocks.
        address, size, requested: of every block, in order of address within its segment.
        state: `FREE`, `ACTIVE` or `AWAITING`.
        settings: the allocator's, as far as they can be read.
    """

    places: tuple[SegmentPlace, ...]
    first: Int64s
    address: Int64s
    size: Int64s
    requested: Int64s
    state: NDArray[np.int8]
    settings: AllocatorSettings

    def needs_of(self, blocks: Int64s) -> Int64s:
        """Sizes if allocated again: without the rest of up to 1 MiB that a large pool's block may have."""
        asked = self.requested[blocks]
        if divides(self.settings):
            return np.array(list(map(self.settings.round_size, asked.tolist())), np.int64)
        return np.maximum(-(-asked // MIN_BLOCK), 1) * MIN_BLOCK


def divides(settings: AllocatorSettings) -> bool:
    """Whether requests are rounded up to divisions of powers of two, not only to multiples of 512 bytes."""
    return any(divisions > 1 for divisions in settings.roundup_power2_divisions)


def layout_of_raw(raw: Iterable[Mapping[str, Any]], device: int, settings: AllocatorSettings) -> DeviceLayout:
    """A layout from the dictionaries of `torch.cuda.memory_snapshot()`; other devices are left out.

    The blocks of a segment have no gaps between them, so their addresses follow from their sizes.
    """
    mine = sorted(
        (segment for segment in raw if segment.get("device", 0) == device), key=itemgetter("address")
    )
    blocks = list(chain.from_iterable(map(itemgetter("blocks"), mine)))
    return _layout(
        tuple(
            [
                SegmentPlace(
                    segment["address"],
                    segment["total_size"],
                    segment["stream"],
                    tuple(segment.get("segment_pool_id", DEFAULT_POOL)),
                    segment["segment_type"] == "small",
                    bool(segment.get("is_expandable", False)),
                    segment.get("registration_counter", -1) >= 0,
                )
                for segment in mine
            ]
        ),
        [len(segment["blocks"]) for segment in mine],
        map(itemgetter("size"), blocks),
        map(itemgetter("requested_size"), blocks),
        # A bytes object is made faster than any array.
        np.frombuffer(bytes([_STATES[block["state"]] for block in blocks]), np.int8),
        settings,
    )


def layout_of_segments(segments: Iterable[Segment], settings: AllocatorSettings) -> DeviceLayout:
    """A layout from plain segments of one device."""
    ordered = sorted(segments, key=lambda segment: segment.address)
    blocks = [block for simulated in ordered for block in simulated.blocks]
    return _layout(
        tuple(
            SegmentPlace(
                address=simulated.address,
                size=simulated.size,
                stream=simulated.stream,
                pool=simulated.pool,
                small=simulated.size <= SMALL_SEGMENT
                if simulated.page is None
                else simulated.page == SMALL_SEGMENT,
                expandable=simulated.expandable,
            )
            for simulated in ordered
        ),
        [len(simulated.blocks) for simulated in ordered],
        map(attrgetter("size"), blocks),
        map(attrgetter("requested"), blocks),
        np.frombuffer(bytes([_MODEL_STATES[block.state] for block in blocks]), np.int8),
        settings,
    )


def _layout(
    places: tuple[SegmentPlace, ...],
    counts: Sequence[int],
    sizes: Iterable[int],
    requested: Iterable[int],
    state: NDArray[np.int8],
    settings: AllocatorSettings,
) -> DeviceLayout:
    first = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    blocks = int(first[-1])
    size = np.fromiter(sizes, np.int64, blocks)
    passed = np.zeros(blocks + 1, np.int64)
    np.cumsum(size, out=passed[1:])
    start = np.fromiter([place.address for place in places], np.int64, len(places))
    address = passed[:-1] + np.repeat(start - passed[first[:-1]], counts)
    asked = np.fromiter(requested, np.int64, blocks)
    return DeviceLayout(places, first, address, size, asked, state, settings)


class Storage(Protocol):
    """The part of `torch.UntypedStorage` that a remedy needs."""

    def nbytes(self) -> int:
        """Its size in bytes."""

    def data_ptr(self) -> int:
        """Its first byte; 0 when it has none."""


@dataclass(frozen=True, slots=True)
class Use:
    """An allocator's counters, in bytes.

    Attributes:
        allocated: live blocks.
        reserved: segments.
    """

    allocated: int
    reserved: int


OUT_OF_MEMORY: Final = (torch.OutOfMemoryError, MemoryError)
"""What torch, Python and the simulator raise if memory is short."""


class Device(Protocol):
    """One device. Sizes and addresses in bytes.

    Streams are identified by their handles, as in a snapshot (0 is the default stream). Every operation may
    raise `RuntimeError` (`torch.OutOfMemoryError` is one) or `MemoryError`; then it has done nothing, unless
    stated otherwise.
    """

    @property
    def name(self) -> str:
        """`cuda:N`."""

    def entered(self) -> AbstractContextManager[Any]:
        """Every other operation must be called inside this: the device is current, no hook of a mode runs."""

    def use(self) -> Use:
        """The allocator's counters."""

    def available(self) -> int:
        """What the allocator could still reserve: the driver's free memory, within this process's limit."""

    def layout(self) -> DeviceLayout:
        """Segments and blocks of this device, and the allocator's settings."""

    def snapshot(self) -> Callable[[], DeviceLayout]:
        """The same in two steps: the result of calling what is returned is as of now."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def empty_cache(self) -> None:
        """Return wholly free segments and pages to the driver."""

    def allocate(self, nbytes: int, stream: int) -> int:
        """Allocate a block that no storage owns; return its address. Free it with `release`."""

    def release(self, address: int) -> None:
        """Free a block of `allocate`."""

    def resize(self, storages: Sequence[Any], sizes: Sequence[int], stream: int) -> None:
        """`storage.resize_(size)` for each, in order, with `stream` current.

        With its present size, a storage moves to a new block with its bytes. From or to 0 bytes, nothing is
        copied. On failure the earlier storages are resized, and the failing one is unchanged.
        """

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: int) -> None:
        """Copy `sizes[i]` bytes from `sources[i]` to `targets[i]` on a stream; none overlap.

        Returns before it is done. On failure any part of the targets may be written.
        """

    def download(self, target: Any, source: int) -> None:
        """Copy device memory, beginning at `source`, into a CPU tensor of `torch.uint8`, and wait."""

    def upload(self, target: int, source: Any) -> None:
        """Copy a CPU tensor of `torch.uint8` to device memory, beginning at `target`, and wait."""
