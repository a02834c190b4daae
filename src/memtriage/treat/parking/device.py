"""What parking does on one device: look, wait, copy both ways, resize a storage, return cached memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from memtriage.model.blocks import DEFAULT_POOL
from memtriage.observe import cuda
from memtriage.treat.compaction.one_device import PRIVATE, REGISTERED
from memtriage.treat.compaction.storages import FIXED, GRAPH, NOT_OURS
from memtriage.treat.device.cuda import CudaDevice
from memtriage.treat.device.protocol import DeviceLayout
from memtriage.treat.offload.pipeline import lane_to
from memtriage.treat.parking.arena import Home
from memtriage.treat.priming import DROPPED


@dataclass(frozen=True, slots=True)
class Spot:
    """What is known about the memory of a storage.

    Attributes:
        reason: why it cannot be parked; None if it can.
        stream: handle of the stream of its memory, to which it returns; 0 is the default stream.
    """

    reason: str | None
    stream: int = 0


class Ways:
    """Copies to and from a CPU "device": the same calls in the same order, each done when it returns."""

    pins = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lane = lane_to(device)

    def look(self, storages: Sequence[torch.UntypedStorage], *, graphs: bool) -> list[Spot]:
        """Where each storage is, and why it cannot be parked.

        Args:
            graphs: captured CUDA graphs are not a reason.
        """
        return [Spot(None if storage.resizable() else FIXED) for storage in storages]

    def synchronize(self) -> None:
        """Wait for all work on the device, on all streams."""

    def resize(self, storage: torch.UntypedStorage, nbytes: int, stream: int) -> None:
        """Free a storage's memory (0), or give it memory of a stream.

        Raises:
            torch.OutOfMemoryError: the storage is unchanged.
        """
        storage.resize_(nbytes)

    def down(self, storage: torch.UntypedStorage, home: Home) -> None:
        """Begin to copy a storage to the host."""
        with self.lane.down():
            for on_device, on_host in pairs(storage, home):
                on_host.copy_(on_device, non_blocking=True)

    def up(self, storage: torch.UntypedStorage, home: Home) -> None:
        """Begin to copy a storage's values to it."""
        with self.lane.up():
            for on_device, on_host in pairs(storage, home):
                on_device.copy_(on_host, non_blocking=True)

    def release(self) -> None:
        """Return the allocator's unused memory to the driver."""


class CudaWays(Ways):
    """Copies to and from a CUDA device, with a stream for each direction."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._chip = CudaDevice(device.index)

    def look(self, storages: Sequence[torch.UntypedStorage], *, graphs: bool) -> list[Spot]:
        with self._chip.entered():
            if cuda.capturing():
                return [Spot(GRAPH)] * len(storages)
            layout = self._chip.layout()
        addresses = np.array([storage.data_ptr() for storage in storages], np.uint64).astype(np.int64)
        # Storages sent to other processes can be parked: torch keeps their memory until it is released there.
        spots = spots_in(layout, addresses, graphs=graphs)
        fixed = super().look(storages, graphs=graphs)
        return [
            replace(spot, reason=spot.reason or other.reason)
            for spot, other in zip(spots, fixed, strict=True)
        ]

    def synchronize(self) -> None:
        self._chip.synchronize()

    def resize(self, storage: torch.UntypedStorage, nbytes: int, stream: int) -> None:
        self._chip.resize([storage], [nbytes], stream)

    def release(self) -> None:
        with self._chip.entered():
            torch.cuda.ipc_collect()  # memory sent to other processes and released there
            self._chip.empty_cache()


def ways_to(device: torch.device) -> Ways:
    """The ways to a device of type `cuda` or `cpu`."""
    return CudaWays(device) if device.type == "cuda" else Ways(device)


def spots_in(layout: DeviceLayout, addresses: np.ndarray, *, graphs: bool) -> list[Spot]:
    """Where storages are, by their first bytes.

    Source: ids of captured graphs' pools begin with the capture's number, those of a user's `MemPool` with 0
    (`MempoolId_t` in c10/core/Allocator.h).

    Args:
        graphs: captured graphs are not a reason.
    """
    if not graphs and any(place.pool[0] for place in layout.places):
        return [Spot(GRAPH)] * len(addresses)
    starts = np.array([place.address for place in layout.places], np.int64)
    at = np.searchsorted(starts, addresses, side="right") - 1
    return [_spot(layout, int(index), int(address)) for index, address in zip(at, addresses, strict=True)]


def _spot(layout: DeviceLayout, index: int, address: int) -> Spot:
    if index < 0 or address >= layout.places[index].address + layout.places[index].size:
        return Spot(NOT_OURS)
    place = layout.places[index]
    if place.pool != DEFAULT_POOL and place.pool not in DROPPED:
        return Spot(PRIVATE)
    return Spot(REGISTERED if place.registered else None, place.stream)


def pairs(storage: torch.UntypedStorage, home: Home) -> Iterator[tuple[Tensor, Tensor]]:
    """Runs of bytes on the device, each with the run of its home that has its values."""
    nbytes = storage.nbytes()
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
    at = 0
    for piece in home:
        length = min(piece.length, nbytes - at)
        yield raw[at : at + length], piece.bytes[:length]
        at += length
