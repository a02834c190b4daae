"""A simulated device: the allocator's simulator, with storages that have no bytes, for a dry run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from torch import Tensor

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.driver import ALIGNMENT, TOP, Driver
from memtriage.allocator.recorded_start import OldBlock, Ranges, Region, StartingState
from memtriage.allocator.restore import restore
from memtriage.allocator.settings import SMALL_SEGMENT
from memtriage.allocator.simulator import Simulator
from memtriage.model.recording import Int64s
from memtriage.treat.device.protocol import ACTIVE, AWAITING, Device, DeviceLayout, Use, layout_of_segments


class SimulatedStorage:
    """A storage of a simulated device."""

    __slots__ = ("_nbytes", "block")

    def __init__(self, block: SimBlock | None, nbytes: int) -> None:
        self.block = block
        self._nbytes = nbytes

    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._nbytes

    def data_ptr(self) -> int:
        """Its first byte; 0 when it has none."""
        return 0 if self.block is None else self.block.address


class SimulatedDevice(Device):
    """A device over a simulator."""

    def __init__(
        self,
        simulator: Simulator,
        *,
        driver: Driver | None = None,
        index: int = 0,
    ) -> None:
        self.simulator = simulator
        self._driver = driver
        self._index = index
        self._held: dict[int, SimBlock] = {}

    @property
    def name(self) -> str:
        return f"cuda:{self._index}"

    def entered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def use(self) -> Use:
        return Use(self.simulator.allocated, self.simulator.reserved)

    def available(self) -> int:
        if self._driver is None or self._driver.capacity is None:
            return UNLIMITED
        return max(0, self._driver.capacity - self._driver.used)

    def layout(self) -> DeviceLayout:
        return layout_of_segments(self.simulator.snapshot(), self.simulator.settings)

    def snapshot(self) -> Callable[[], DeviceLayout]:
        layout = self.layout()
        return lambda: layout

    def synchronize(self) -> None:
        """Stream work is always done."""

    def empty_cache(self) -> None:
        self.simulator.empty_cache()

    def allocate(self, nbytes: int, stream: int) -> int:
        block = self.simulator.malloc(nbytes, stream)
        self._held[block.address] = block
        return block.address

    def release(self, address: int) -> None:
        self.simulator.free(self._held.pop(address))

    def resize(self, storages: Sequence[SimulatedStorage], sizes: Sequence[int], stream: int) -> None:
        """As `resize_bytes_cuda`: allocate, copy, free, in this order."""
        for storage, nbytes in zip(storages, sizes, strict=True):
            old = storage.block
            storage.block = self.simulator.malloc(nbytes, stream) if nbytes else None
            storage._nbytes = nbytes
            if old is not None:
                self.simulator.free(old)

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: int) -> None:
        """There are no bytes."""

    def download(self, target: Tensor, source: int) -> None:
        """There are no bytes."""

    def upload(self, target: int, source: Tensor) -> None:
        """There are no bytes."""


UNLIMITED: Final = 1 << 60
"""Bytes of a driver without a limit."""


class _BelowDriver(Driver):
    """Returns addresses below those in use."""

    def __init__(self, lowest: int, capacity: int | None) -> None:
        super().__init__(capacity)
        self._lowest = lowest


def simulate(
    layout: DeviceLayout, available: int | None
) -> tuple[SimulatedDevice, dict[int, SimulatedStorage]]:
    """A simulated device with the layout of a real one, without bytes.

    Returns:
        The device, and a storage for every live block, by address.
    """
    lowest = min((place.address for place in layout.places), default=TOP)
    driver = _BelowDriver(lowest // ALIGNMENT * ALIGNMENT, available)
    simulator = Simulator(layout.settings, driver=driver)
    live = restore(simulator, _start(layout))
    device = SimulatedDevice(simulator, driver=driver)
    return device, {address: SimulatedStorage(block, block.requested) for address, block in live.items()}


def _start(layout: DeviceLayout) -> StartingState:
    start = StartingState(regions=[], mapped=Ranges())
    large_page = layout.settings.large_segment_size
    for place in layout.places:
        page = 0 if not place.expandable else SMALL_SEGMENT if place.small else large_page
        start.regions.append(Region(place.address, place.size, place.stream, place.pool, page))
        if place.expandable:
            start.mapped.add(place.address, place.address + place.size)
    for index in np.flatnonzero(layout.state == ACTIVE).tolist():
        address, size = int(layout.address[index]), int(layout.size[index])
        start.blocks.append(OldBlock(address, size, int(layout.requested[index]), 0, False))
    for index in np.flatnonzero(layout.state == AWAITING).tolist():
        start.occupied.append((int(layout.address[index]), int(layout.size[index])))
    return start
