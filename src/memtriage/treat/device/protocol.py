"""What remedies ask of a device: its memory's layout, and the few operations that change it.

`CudaDevice` does it on a GPU. `SimulatedDevice` does it over the allocator's simulator: tests use it with
bytes at every address, a dry run without them.

Everything is by address: no tensor is made for a storage, so no version counter moves and no hook runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memtriage.model.recording import Int64s
from memtriage.treat.device.layout import DeviceLayout


class Storage(Protocol):
    """The part of `torch.UntypedStorage` that a remedy needs."""

    def nbytes(self) -> int:
        """Its size in bytes."""
        ...

    def data_ptr(self) -> int:
        """Its first byte; 0 when it has none."""
        ...


@dataclass(frozen=True, slots=True)
class Use:
    """An allocator's counters, in bytes.

    Attributes:
        allocated: live blocks.
        reserved: segments.
    """

    allocated: int
    reserved: int


def is_out_of_memory(error: BaseException) -> bool:
    """True for what says that memory is short: torch's error, Python's and the simulator's."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


class Device(Protocol):
    """One device. Sizes and addresses in bytes.

    Streams are named by their handles, as a snapshot does (0 is the default stream). Every operation may
    raise `RuntimeError` (`torch.OutOfMemoryError` is one) or `MemoryError`; then it has done nothing, except
    where said otherwise.
    """

    @property
    def name(self) -> str:
        """`cuda:N`."""
        ...

    def entered(self) -> AbstractContextManager[Any]:
        """Every other operation is called inside this: the device is current, no hook of a mode runs."""
        ...

    def use(self) -> Use:
        """The allocator's counters."""
        ...

    def available(self) -> int:
        """What the allocator could still reserve: the driver's free memory, within this process's limit."""
        ...

    def layout(self) -> DeviceLayout:
        """Segments and blocks of this device, and the allocator's settings."""
        ...

    def snapshot(self) -> Callable[[], DeviceLayout]:
        """The same in two steps: what the call gives is of now, whatever the device does meanwhile."""
        ...

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        ...

    def empty_cache(self) -> None:
        """Give wholly free segments and pages back to the driver."""
        ...

    def allocate(self, nbytes: int, stream: int) -> int:
        """A block that no storage owns; its address. To be given back with `release`."""
        ...

    def release(self, address: int) -> None:
        """Free a block of `allocate`."""
        ...

    def resize(self, storages: Sequence[Any], sizes: Sequence[int], stream: int) -> None:
        """`storage.resize_(size)` for each, in order, with `stream` current.

        To the size that it has: the storage moves to a new block, its bytes with it. From or to 0 bytes:
        nothing is copied. On failure what came before is done, and the storage that failed is as it was.
        """
        ...

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: int) -> None:
        """Copy `sizes[i]` bytes from `sources[i]` to `targets[i]` on a stream; none overlap.

        Returns before it is done. On failure any part of the targets may be written.
        """
        ...

    def download(self, target: Any, source: int) -> None:
        """Copy device memory from the address `source` on into a CPU tensor of `torch.uint8`, and wait."""
        ...

    def upload(self, target: int, source: Any) -> None:
        """Copy a CPU tensor of `torch.uint8` to device memory from the address `target` on, and wait."""
        ...
