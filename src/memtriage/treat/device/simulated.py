"""A simulated device: the allocator's simulator with storages, and with bytes at every address if wanted.

Without bytes it predicts what a remedy would do. With them it shows what a remedy does to values: memory is
overwritten when it is allocated and when it is freed, and memory that was returned cannot be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from memtriage.allocator.blocks import SimBlock
from memtriage.allocator.driver import ALIGNMENT, TOP, Driver
from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.recorded_start import OldBlock, Ranges, Region, StartingState, keeps_at_most
from memtriage.allocator.restore import restore
from memtriage.allocator.settings import SMALL_SEGMENT
from memtriage.allocator.simulator import Simulator
from memtriage.model.recording import Int64s
from memtriage.treat.device.layout import ACTIVE, AWAITING, DeviceLayout, layout_of_segments
from memtriage.treat.device.protocol import Use

STALE: Final = 0xDD
"""The value of memory that was not written since it was allocated or freed."""

Before = Callable[[str], None]
"""Called with an operation's name before it is done; may raise instead, or change the simulator."""


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

    def become(self, block: SimBlock | None, nbytes: int) -> None:
        """Take another block."""
        self.block, self._nbytes = block, nbytes


class SimulatedMemory:
    """Bytes behind addresses. Listens to an allocator's events; holds what the driver has handed out.

    Args:
        grain: keep one byte for this many, up to `MIN_BLOCK`, of which all blocks are multiples.
    """

    def __init__(self, grain: int = 1) -> None:
        self._grain = grain
        self._pieces: dict[int, np.ndarray] = {}

    def length(self, nbytes: int) -> int:
        """How many bytes are kept for `nbytes`."""
        return -(-nbytes // self._grain)

    def heard(self, event: AllocatorEvent) -> None:
        """Follow the allocator."""
        if event.action in ("segment_alloc", "segment_map"):
            for start in range(event.address, event.address + event.size, ALIGNMENT):
                self._pieces[start] = np.full(self.length(ALIGNMENT), STALE, np.uint8)
        elif event.action in ("segment_free", "segment_unmap"):
            for start in range(event.address, event.address + event.size, ALIGNMENT):
                del self._pieces[start]
        elif event.action in ("alloc", "free_completed"):
            self.write(event.address, np.full(self.length(event.size), STALE, np.uint8))

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """Copy what is kept of the bytes.

        Raises:
            KeyError: that memory was returned to the driver.
        """
        parts = [piece[low:high] for piece, low, high in self._spans(address, self.length(nbytes))]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def write(self, address: int, values: np.ndarray) -> None:
        """Set what is kept of the bytes.

        Raises:
            KeyError: that memory was returned to the driver.
        """
        done = 0
        for piece, low, high in self._spans(address, len(values)):
            piece[low:high] = values[done : done + high - low]
            done += high - low

    def _spans(self, address: int, count: int) -> Iterator[tuple[np.ndarray, int, int]]:
        whole = self.length(ALIGNMENT)
        while count > 0:
            start = address // ALIGNMENT * ALIGNMENT
            low = (address - start) // self._grain
            high = min(low + count, whole)
            yield self._pieces[start], low, high
            count -= high - low
            address = start + ALIGNMENT


class SimulatedDevice:
    """A device over a simulator.

    Args:
        simulator: the allocator. With `memory`, its hook must be `memory.heard`.
        memory: the bytes; None for none.
        before: see `Before`.
        driver: the simulated driver; None for no limit.
        index: the CUDA index that it simulates.
    """

    def __init__(
        self,
        simulator: Simulator,
        *,
        memory: SimulatedMemory | None = None,
        before: Before | None = None,
        driver: Driver | None = None,
        index: int = 0,
    ) -> None:
        self.simulator = simulator
        self.memory = memory
        self.before = before
        self._driver = driver
        self._index = index
        self._held: dict[int, SimBlock] = {}

    @property
    def name(self) -> str:
        """`cuda:N`."""
        return f"cuda:{self._index}"

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to enter."""
        return contextlib.nullcontext()

    def use(self) -> Use:
        """The simulator's counters."""
        return Use(self.simulator.allocated, self.simulator.reserved)

    def available(self) -> int:
        """Bytes that the simulated driver could still provide."""
        if self._driver is None or self._driver.capacity is None:
            return UNLIMITED
        return max(0, self._driver.capacity - self._driver.used)

    def layout(self) -> DeviceLayout:
        """The simulator's segments."""
        self._about("layout")
        return layout_of_segments(self.simulator.snapshot(), self.simulator.settings)

    def snapshot(self) -> Callable[[], DeviceLayout]:
        """Read at once."""
        layout = self.layout()
        return lambda: layout

    def synchronize(self) -> None:
        """Stream work is always done."""
        self._about("synchronize")

    def empty_cache(self) -> None:
        """Return free memory."""
        self._about("empty_cache")
        self.simulator.empty_cache()

    def allocate(self, nbytes: int, stream: int) -> int:
        """Allocate a block that no storage owns."""
        self._about("allocate")
        block = self.simulator.malloc(nbytes, stream)
        self._held[block.address] = block
        return block.address

    def release(self, address: int) -> None:
        """Free it."""
        self._about("release")
        self.simulator.free(self._held.pop(address))

    def resize(self, storages: Sequence[SimulatedStorage], sizes: Sequence[int], stream: int) -> None:
        """As `resize_bytes_cuda`: allocate, copy, free, in this order."""
        for storage, nbytes in zip(storages, sizes, strict=True):
            self._about("resize")
            old = storage.block
            new = self.simulator.malloc(nbytes, stream) if nbytes else None
            if old is not None and new is not None and self.memory is not None:
                kept = min(nbytes, storage.nbytes())
                self.memory.write(new.address, self.memory.read(old.address, kept))
            storage.become(new, nbytes)
            if old is not None:
                self.simulator.free(old)

    def copy(self, targets: Int64s, sources: Int64s, sizes: Int64s, stream: int) -> None:
        """Range by range, at once."""
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._about("copy")
            if self.memory is not None:
                self.memory.write(target, self.memory.read(source, size))

    def download(self, target: Tensor, source: int) -> None:
        """To a CPU tensor."""
        self._about("download")
        if self.memory is not None:
            values = self.memory.read(source, target.numel())
            target[: len(values)] = torch.from_numpy(values)

    def upload(self, target: int, source: Tensor) -> None:
        """From a CPU tensor."""
        self._about("upload")
        if self.memory is not None:
            self.memory.write(target, source.numpy()[: self.memory.length(source.numel())])

    def _about(self, operation: str) -> None:
        if self.before is not None:
            self.before(operation)


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

    Args:
        layout: segments and blocks.
        available: bytes that the driver could still provide; None for no limit.

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
        keeps = keeps_at_most(place.size)
        start.regions.append(Region(place.address, place.size, place.stream, place.pool, page, keeps))
        if place.expandable:
            start.mapped.add(place.address, place.address + place.size)
    for index in np.flatnonzero(layout.state == ACTIVE).tolist():
        address, size = int(layout.address[index]), int(layout.size[index])
        start.blocks.append(OldBlock(address, size, int(layout.requested[index]), 0, True, False))
    for index in np.flatnonzero(layout.state == AWAITING).tolist():
        start.occupied.append((int(layout.address[index]), int(layout.size[index])))
    return start
