"""The counters that a mark reads: allocator, malloc, resident set. Made to cost well under 0.2 ms."""

from __future__ import annotations

import time

import msgspec

from memtriage.model.blocks import DeviceCounters
from memtriage.observe import cuda, driver, host, malloc

_OUTSIDE_EVERY_S = 1.0
_DEVICES_EVERY = 32
_MALLOC_SHARE = 0.01
_ALWAYS_MARKS = 200
_ALWAYS_S = 50e-6
_PINNED_EVERY = 8


class Reading(msgspec.Struct, gc=False):
    """One device's counters at one instant, in bytes; None where there is no such counter.

    `counters`: all that the CUDA allocator counts, of which the first three are a part.
    """

    device: str
    allocated: int | None = None
    reserved: int | None = None
    requested: int | None = None
    outside: int | None = None
    counters: DeviceCounters | None = None


class CounterReader:
    """Reads the counters of every device in use. One for each watch; not shared between threads.

    `cpu` has no counter of its own: there `allocated` is what malloc has handed out, `reserved` what it has
    from the kernel. mallinfo2 walks every free chunk (0.7 ms for 20,000 of them), so on a fragmented heap it
    is read less often after the first 200 marks: it may take 1 % of the time. A mark between two readings has
    no figure rather than an old one.
    """

    def __init__(self) -> None:
        self._devices: list[int] = []
        self._names: dict[int, str] = {}
        self._until_devices = 0
        self._outside: dict[int, tuple[float, int | None]] = {}
        self._malloc_due = 0.0
        self._malloc_readings = 0
        malloc.malloc_info()  # the first call looks glibc up
        self._pinned: int | None = None
        self._until_pinned = 0

    def read(self) -> list[Reading]:
        """The CPU's reading first, then each CUDA device's that this process uses."""
        now = time.perf_counter()
        readings = [self._cpu(now)]
        if cuda.initialised():
            self._until_devices -= 1
            if self._until_devices < 0 or not self._devices:
                self._devices = cuda.devices()
                self._until_devices = _DEVICES_EVERY
            for device in self._devices:
                name = self._names.get(device)
                if name is None:
                    name = self._names[device] = f"cuda:{device}"
                found = cuda.counters(device)
                outside = self._outside_of(device, found.reserved, now)
                readings.append(
                    Reading(name, found.allocated, found.reserved, found.requested, outside, found)
                )
        return readings

    def rss(self) -> int | None:
        """Resident set of the process."""
        return host.rss()

    def in_use(self) -> host.InUse | None:
        """What limits on the process count."""
        return host.in_use()

    def shared(self) -> int | None:
        """Resident memory that is mapped from files or shared: tensors in shared memory are in it."""
        return host.shared()

    def pinned(self) -> int | None:
        """Bytes that the pinned-memory allocator owns; None before CUDA is initialised."""
        if not cuda.initialised():
            return None
        self._until_pinned -= 1
        if self._until_pinned < 0:
            stats = host.pinned()
            self._pinned = None if stats is None else stats.owned
            self._until_pinned = _PINNED_EVERY
        return self._pinned

    def _cpu(self, now: float) -> Reading:
        if now < self._malloc_due:
            return Reading("cpu")
        info = malloc.malloc_info()
        took = time.perf_counter() - now
        self._malloc_readings += 1
        if took > _ALWAYS_S and self._malloc_readings > _ALWAYS_MARKS:
            self._malloc_due = now + took / _MALLOC_SHARE
        return Reading("cpu") if info is None else Reading("cpu", info.in_use, info.from_kernel)

    def _outside_of(self, device: int, reserved: int | None, now: float) -> int | None:
        read_at, outside = self._outside.get(device, (-_OUTSIDE_EVERY_S, None))
        if now - read_at >= _OUTSIDE_EVERY_S and not cuda.capturing():
            used = driver.used(device)
            outside = None if used is None or reserved is None else max(0, used - reserved)
            self._outside[device] = (now, outside)
        return outside
