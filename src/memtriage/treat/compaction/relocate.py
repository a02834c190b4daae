"""Empty storages and fill them again elsewhere, so that no failure can lose a value.

The values are copied first. Until all are back, the copy is the truth. Bringing back can be repeated from any
point: it gives memory to the storages that have none, and copies everything again. If the device has no room
any more (another thread took it), the copy moves to the host, and the storages get its device memory. If even
that fails, the error that is raised holds the copy and can bring it back later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch

from memtriage.allocator.settings import MIN_BLOCK, OWN_SEGMENT, SEGMENT_STEP
from memtriage.model.recording import Int64s
from memtriage.model.units import size
from memtriage.treat.device.protocol import Device, Storage


class OnDevice:
    """A copy in one block of device memory.

    Args:
        stream: the stream of both the copy's and the values' allocations. Whatever gets this memory later
            writes to it after the copy, so `save` need not wait. The driver waits before it frees any.
        page: segment sizes are multiples of this.

    Raises:
        RuntimeError, MemoryError: there is no room for it.
    """

    def __init__(self, device: Device, offsets: Int64s, sizes: Int64s, stream: int, page: int) -> None:
        self._device = device
        self._offsets, self._sizes = offsets, sizes
        # Whole segments: storages would be allocated in a rest after the copy, and pin it.
        whole = -(-int(offsets[-1] + sizes[-1]) // page) * page
        self._stream = stream
        self._address = device.allocate(max(whole, OWN_SEGMENT), stream)

    def save(self, addresses: Int64s) -> None:
        """Copy from the device's addresses, in one batch; later work on the stream comes after it."""
        self._device.copy(self._address + self._offsets, addresses, self._sizes, self._stream)

    def load(self, addresses: Int64s) -> None:
        """Copy to the device's addresses, in one batch, and wait."""
        self._device.copy(addresses, self._address + self._offsets, self._sizes, self._stream)
        self._device.synchronize()

    def drop(self) -> None:
        """Free it. Repeatable."""
        address, self._address = self._address, 0
        if address:
            self._device.release(address)

    def to_host(self) -> OnHost:
        """Copy the values to the host; this copy stays."""
        copied = OnHost(self._device, self._offsets, self._sizes)
        copied.save(self._address + self._offsets)
        return copied


class OnHost:
    """A copy in pageable host memory."""

    def __init__(self, device: Device, offsets: Int64s, sizes: Int64s) -> None:
        self._device = device
        ends = offsets + sizes
        memory = torch.from_numpy(np.empty(int(ends[-1]), np.uint8))
        self._parts = [memory[a:b] for a, b in zip(offsets.tolist(), ends.tolist(), strict=True)]

    def save(self, addresses: Int64s) -> None:
        """Copy from the device's addresses, one by one."""
        self._device.synchronize()
        for part, address in zip(self._parts, addresses.tolist(), strict=True):
            self._device.download(part, address)

    def load(self, addresses: Int64s) -> None:
        """Copy to the device's addresses, one by one, and wait."""
        for part, address in zip(self._parts, addresses.tolist(), strict=True):
            self._device.upload(address, part)
        self._device.synchronize()

    def drop(self) -> None:
        """Free it."""
        self._parts = []


Keep: TypeAlias = OnDevice | OnHost


TRIES: Final = 3
"""How often bringing back is tried before the copy moves to the host or the error is raised."""


class CompactionError(RuntimeError):
    """Storages were emptied and could not get memory again. Their values are in this error.

    Free device memory, then call `restore()`. Until then, tensors on those storages must not be used.
    """

    def __init__(self, text: str, relocation: Relocation) -> None:
        super().__init__(text)
        self._relocation = relocation

    def restore(self) -> None:
        """Bring the values back.

        Raises:
            RuntimeError, MemoryError: there is still no room; it may be called again.
        """
        self._relocation.bring_back()
        self._relocation.keep.drop()


class MoveBatch:
    """Storages that move together, with everything that can be computed before the move.

    Args:
        storages: in the order in which they will be allocated again.

    Attributes:
        storages, addresses: as given.
        sizes: of the storages.
        lengths: the sizes, as a column.
        offsets: where each begins in a copy of all, one after the other.
        by_address: the storages in the order of their addresses.
    """

    def __init__(self, storages: Sequence[Storage], addresses: Int64s) -> None:
        self.storages = storages
        self.addresses = addresses
        self.lengths = _column("nbytes", storages)
        self.sizes = self.lengths.tolist()
        steps = -(-self.lengths // MIN_BLOCK) * MIN_BLOCK
        self.offsets: Int64s = np.cumsum(steps) - steps
        self.by_address = list(map(storages.__getitem__, np.argsort(addresses).tolist()))


class Relocation:
    """Some storages of one stream, and the copy of their values.

    Args:
        stream: the stream that they were allocated on.
        page: segment sizes are multiples of this.

    Raises:
        RuntimeError, MemoryError: there is no room for the copy; nothing has changed.
    """

    def __init__(
        self, device: Device, batch: MoveBatch, stream: int, *, on_host: bool, page: int = SEGMENT_STEP
    ) -> None:
        self._device = device
        self._batch = batch
        self._storages = batch.storages
        self._stream = stream
        self.keep: Keep = (
            OnHost(device, batch.offsets, batch.lengths)
            if on_host
            else OnDevice(device, batch.offsets, batch.lengths, stream, page)
        )

    def run(self, refill: Callable[[], None] | None) -> None:
        """Copy, empty, have `refill` give memory to the storages where it can, then fill them.

        Raises:
            CompactionError: the values are in the error.
            BaseException: whatever a step raised; every storage has its values, old place or new.
        """
        try:
            self.keep.save(self._batch.addresses)
        except BaseException:
            self.keep.drop()
            raise
        try:
            # In order of address, so that each merges with the hole that the last one left.
            self._device.resize(self._batch.by_address, [0] * len(self._storages), self._stream)
            if refill is None:
                self._device.resize(self._storages, self._batch.sizes, self._stream)
                self._load()
            else:
                refill()
                self.bring_back()
        except BaseException as error:
            self._rescue(error)
            raise
        self.keep.drop()

    def bring_back(self) -> None:
        """Give memory to the storages that have none, then copy all values to all of them."""
        empty = np.flatnonzero(_column("nbytes", self._storages) == 0).tolist()
        self._device.resize(
            [self._storages[index] for index in empty],
            [self._batch.sizes[index] for index in empty],
            self._stream,
        )
        self._load()

    def _load(self) -> None:
        self.keep.load(_column("data_ptr", self._storages))

    def _rescue(self, error: BaseException) -> None:
        """Bring everything back, or raise what holds it."""
        if self._tried():
            return
        if isinstance(self.keep, OnDevice) and self._moved_to_host(self.keep) and self._tried():
            return
        lost = size(sum(self._batch.sizes))
        text = (
            f"{len(self._storages)} storages ({lost}) could not get their memory back "
            f"after a failure ({type(error).__name__}: {error}); this error keeps their values: free "
            "device memory, then call its restore()"
        )
        raise CompactionError(text, self) from error

    def _moved_to_host(self, copy: OnDevice) -> bool:
        """Make the memory of the copy free for the storages."""
        for _ in range(TRIES):
            try:
                self.keep = copy.to_host()
            except BaseException:
                continue
            with contextlib.suppress(BaseException):
                copy.drop()
            return True
        return False

    def _tried(self) -> bool:
        # Whatever stops it, an interrupt too: until the values are back nothing else matters.
        for _ in range(TRIES):
            try:
                self.bring_back()
            except BaseException:
                continue
            with contextlib.suppress(BaseException):
                self.keep.drop()
            return True
        return False


def _column(method: str, storages: Sequence[Storage]) -> Int64s:
    """Call a method of each storage. They have the same class, so it is looked up once."""
    kind = type(storages[0])
    return np.fromiter(map(getattr(kind, method), storages), np.int64, len(storages))
