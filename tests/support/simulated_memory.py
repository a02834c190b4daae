"""A simulated device with bytes at every address, which shows what a remedy does to values.

Memory is overwritten when it is allocated and when it is freed, and memory that was returned cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from memtriage.allocator.driver import ALIGNMENT, Driver
from memtriage.allocator.events import AllocatorEvent
from memtriage.allocator.settings import parse_conf
from memtriage.allocator.simulator import Simulator
from memtriage.treat.device.simulated import SimulatedDevice, SimulatedStorage

STALE: Final = 0xDD
"""The value of memory that was not written since it was allocated or freed."""

VERSION = "2.11.0"


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


class DeviceWithBytes(SimulatedDevice):
    """A device whose storages have bytes.

    Args:
        conf: settings of the allocator.
        capacity: bytes of the driver; None for no limit.
        before: called with an operation's name before it is done; may raise, or change the simulator.
        grain: see `SimulatedMemory`.
        index: the CUDA index that it simulates.
    """

    def __init__(
        self,
        conf: str = "",
        capacity: int | None = None,
        before: Callable[[str], None] | None = None,
        grain: int = 1,
        index: int = 0,
    ) -> None:
        self.memory, driver = SimulatedMemory(grain), Driver(capacity)
        simulator = Simulator(parse_conf(conf, VERSION), driver=driver, hook=self.memory.heard)
        super().__init__(simulator, driver=driver, index=index)
        self.before = before

    def resize(self, storages: Sequence[SimulatedStorage], sizes: Sequence[int], stream: int) -> None:
        for storage, nbytes in zip(storages, sizes, strict=True):
            self._about("resize")
            old, kept = storage.data_ptr(), min(nbytes, storage.nbytes())
            values = self.memory.read(old, kept)
            super().resize([storage], [nbytes], stream)
            if kept:
                self.memory.write(storage.data_ptr(), values)

    def copy(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._about("copy")
            self.memory.write(target, self.memory.read(source, size))

    def download(self, target: torch.Tensor, source: int) -> None:
        self._about("download")
        values = self.memory.read(source, target.numel())
        target[: len(values)] = torch.from_numpy(values)

    def upload(self, target: int, source: torch.Tensor) -> None:
        self._about("upload")
        self.memory.write(target, source.numpy()[: self.memory.length(source.numel())])

    def layout(self) -> Any:
        self._about("layout")
        return super().layout()

    def synchronize(self) -> None:
        self._about("synchronize")

    def empty_cache(self) -> None:
        self._about("empty_cache")
        super().empty_cache()

    def allocate(self, nbytes: int, stream: int) -> int:
        self._about("allocate")
        return super().allocate(nbytes, stream)

    def release(self, address: int) -> None:
        self._about("release")
        super().release(address)

    def _about(self, operation: str) -> None:
        if self.before is not None:
            self.before(operation)


class SimulatedBlocks:
    """Blocks of the simulated allocator."""

    def __init__(self, capacity: int | None = None) -> None:
        self.simulator = Simulator(parse_conf("", "2.11"), capacity=capacity)
        self.peaks_forgotten = self.given_back = 0

    def allocate(self, size: int) -> Any:
        return self.simulator.malloc(size)

    def free(self, block: Any) -> None:
        self.simulator.free(block)

    def give_back(self) -> None:
        self.given_back += 1
        self.simulator.empty_cache()

    def forget_peaks(self) -> None:
        self.peaks_forgotten += 1
