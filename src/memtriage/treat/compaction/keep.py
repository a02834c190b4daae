"""Where values are while their storages have no memory: in scratch on the device, else on the host."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from memtriage.allocator.settings import OWN_SEGMENT
from memtriage.model.recording import Int64s
from memtriage.treat.device.protocol import Device


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
