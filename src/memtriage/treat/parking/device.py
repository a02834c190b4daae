"""What parking does to one device: look, wait, copy both ways, resize a storage, give cached memory back."""

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
from memtriage.treat.device.layout import DeviceLayout
from memtriage.treat.offload.pipeline import lane_to
from memtriage.treat.parking.arena import Home
from memtriage.treat.state_pools import DROPPED


@dataclass(frozen=True, slots=True)
class Spot:
    """What is known of where a storage lies.

    Attributes:
        reason: why it cannot be parked; None where it can.
        stream: handle of the stream whose memory it is, to which it comes back; 0 is the default stream.
    """

    reason: str | None
    stream: int = 0


class Ways:
    """The way to and from a CPU "device": the same calls in the same order, each done when it returns."""

    pins = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lane = lane_to(device)

    def look(self, storages: Sequence[torch.UntypedStorage], *, graphs: bool) -> list[Spot]:
        """Where each storage lies, and why it cannot be parked.

        Args:
            storages: on this device.
            graphs: captured CUDA graphs are no reason.
        """
        return [Spot(None if storage.resizable() else FIXED) for storage in storages]

    def synchronize(self) -> None:
        """Wait for all work on the device, whatever the stream."""

    def resize(self, storage: torch.UntypedStorage, nbytes: int, stream: int) -> None:
        """Give a storage's memory back (0) or give it memory of a stream's.

        Raises:
            torch.OutOfMemoryError: the storage is as it was.
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
        """Give what the allocator keeps unused back to the driver."""


class CudaWays(Ways):
    """The way to and from a CUDA device, with a stream for each direction."""

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
        # What was sent to other processes can go: torch keeps its memory until they have released it.
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
            torch.cuda.ipc_collect()  # what was sent to other processes, and released by them
            self._chip.empty_cache()


def ways_to(device: torch.device) -> Ways:
    """The ways to a device of type `cuda` or `cpu`."""
    return CudaWays(device) if device.type == "cuda" else Ways(device)


def spots_in(layout: DeviceLayout, addresses: np.ndarray, *, graphs: bool) -> list[Spot]:
    """Where storages lie, by their first bytes.

    Source: pools of captured graphs have an id that begins with their capture's number, a user's own
    `MemPool` one that begins with 0 (`MempoolId_t` in c10/core/Allocator.h).

    Args:
        layout: of the device.
        addresses: of the storages.
        graphs: captured graphs are no reason.
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
    """Runs of bytes on the device, each with the run at home that has its values."""
    nbytes = storage.nbytes()
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
    at = 0
    for piece in home:
        length = min(piece.length, nbytes - at)
        yield raw[at : at + length], piece.bytes[:length]
        at += length
