"""The counters that a mark reads: allocator, malloc, resident set. Designed to take well under 0.2 ms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from memtriage.model.blocks import DeviceCounters
from memtriage.observe import cuda, driver, host, malloc
from memtriage.process.stdlib import time

_OUTSIDE_EVERY_S = 1.0
_DEVICES_EVERY = 32
_PINNED_EVERY = 8


@dataclass(frozen=True, slots=True)
class MallocPolicy:
    """How often malloc's counter is read if a reading is slow.

    Attributes:
        cheap_s: readings that take no longer are made at every mark: they are a small part of its cost.
        always: the first readings, made whatever they cost: short runs are judged by every mark.
        step_share: share of the time that readings may take at marks of steps and the like.
        within_step_share: backwards within a step have readings, too, while all readings take less than this
            share of the time.
    """

    cheap_s: float = 50e-6
    always: int = 200
    step_share: float = 0.1
    within_step_share: float = 0.01


MALLOC: Final = MallocPolicy()


class Reading(msgspec.Struct, gc=False):
    """One device's counters at one instant, in bytes; None if there is no such counter.

    `counters` has everything that the CUDA allocator counts, including the first three.
    """

    device: str
    allocated: int | None = None
    reserved: int | None = None
    requested: int | None = None
    outside: int | None = None
    counters: DeviceCounters | None = None


def uncounted(devices: Iterable[str]) -> list[str]:
    """Return the devices without a counter: all but `cuda:N` and `cpu`, such as `xpu:0`."""
    return sorted({device for device in devices if device != "cpu" and not device.startswith("cuda:")})


class CounterReader:
    """Reads the counters of every device in use. One per watch; not shared between threads.

    For `cpu`, `allocated` is what malloc has handed out, and `reserved` what it has from the kernel.
    mallinfo2 walks every free chunk. It takes 1 us on a fresh heap, 0.8 ms with 20,000 free chunks (5 ms if
    they are not in the processor's cache) and 50 ms with 200,000. glibc has no other exact counter: it keeps
    no sum of free bytes, and `malloc_info` walks as far. So marks of steps are read first, and those within a
    step use what is left of the budget: see `MallocPolicy`. A mark without a reading has no figure, rather
    than an old one.
    """

    def __init__(self) -> None:
        self._devices: list[int] = []
        self._names: dict[int, str] = {}
        self._until_devices = 0
        self._outside: dict[int, tuple[float, int | None]] = {}
        self._started = time.perf_counter()
        self._malloc_due = 0.0
        self._malloc_readings = 0
        self._malloc_took = self._malloc_cost = 0.0
        self._malloc_spent = 0.0
        malloc.malloc_info()  # the first call looks up glibc
        self._pinned: int | None = None
        self._until_pinned = 0

    def read(self, within_step: bool = False) -> list[Reading]:
        """Read the CPU's counters first, then those of each CUDA device that this process uses.

        Args:
            within_step: the mark is a backward's, and the program makes steps: if malloc is slow to read,
                other marks have priority.
        """
        now = time.perf_counter()
        readings = [self._cpu(now, within_step)]
        if cuda.initialized():
            self._until_devices -= 1
            if self._until_devices < 0 or not self._devices:
                self._devices = cuda.devices()
                self._until_devices = _DEVICES_EVERY
            for device in self._devices:
                name = self._names.get(device)
                if name is None:
                    name = self._names[device] = f"cuda:{device}"
                counters = cuda.counters(device)
                outside = self._outside_of(device, counters.reserved, now)
                readings.append(
                    Reading(
                        name, counters.allocated, counters.reserved, counters.requested, outside, counters
                    )
                )
        return readings

    def in_malloc(self) -> int | None:
        """Read what malloc has handed out, however long that takes."""
        info = malloc.malloc_info()
        return None if info is None else info.in_use

    def rss(self) -> int | None:
        """Resident set of the process."""
        return host.rss()

    def in_use(self) -> host.InUse | None:
        """Bytes in use, as limits on the process count them."""
        return host.in_use()

    def pinned(self) -> int | None:
        """Bytes that the pinned-memory allocator owns; None before CUDA is initialized."""
        if not cuda.initialized():
            return None
        self._until_pinned -= 1
        if self._until_pinned < 0:
            stats = host.pinned()
            self._pinned = None if stats is None else stats.owned
            self._until_pinned = _PINNED_EVERY
        return self._pinned

    def _cpu(self, now: float, within_step: bool) -> Reading:
        if not self._malloc_is_due(now, within_step):
            return Reading("cpu")
        started = time.thread_time()  # waiting on a busy machine does not count
        info = malloc.malloc_info()
        before, self._malloc_took = self._malloc_took, time.thread_time() - started
        self._malloc_cost = min(before, self._malloc_took)  # one slow reading may be chance
        self._malloc_readings += 1
        self._malloc_spent += self._malloc_took
        self._malloc_due = now + self._malloc_cost / MALLOC.step_share
        return Reading("cpu") if info is None else Reading("cpu", info.in_use, info.from_kernel)

    def _malloc_is_due(self, now: float, within_step: bool) -> bool:
        if self._malloc_cost <= MALLOC.cheap_s or self._malloc_readings < MALLOC.always:
            return True
        if within_step:
            spent = self._malloc_spent + self._malloc_cost
            return spent <= MALLOC.within_step_share * (now - self._started)
        return now >= self._malloc_due

    def _outside_of(self, device: int, reserved: int | None, now: float) -> int | None:
        read_at, outside = self._outside.get(device, (-_OUTSIDE_EVERY_S, None))
        if now - read_at >= _OUTSIDE_EVERY_S and not cuda.capturing():
            used = driver.used(device)
            outside = None if used is None or reserved is None else max(0, used - reserved)
            self._outside[device] = (now, outside)
        return outside
