"""What remedies need from a device: its memory's layout, and the few operations that change it.

`CudaDevice` implements it on a GPU, `SimulatedDevice` on the allocator's simulator, for a dry run. Their
methods are described here.

Everything is by address: no tensor is made for a storage, so no version counter changes and no hook runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from memtriage.model.recording import Int64s
from memtriage.treat.device.layout import DeviceLayout


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
