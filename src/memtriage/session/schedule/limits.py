"""At how many bytes memory runs out, and how many are in use as that limit counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memtriage.observe import cuda, driver
from memtriage.observe.cgroup import counted, host_limit
from memtriage.observe.counters import Reading
from memtriage.observe.host import InUse


def limits_and_use(
    host: InUse | None, readings: Iterable[Reading], passing: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return by device the bytes at which memory runs out, and the bytes in use as that limit counts them.

    A GPU runs out of memory in the middle of a step, so memory that comes and goes counts as in use. Unused
    reserved memory does not: the allocator returns it before an allocation fails.

    Args:
        host, readings: the process's use of host memory and its counters, at a mark while the program ran.
        passing: memory that comes and goes between marks, by device (`session.transient_peak`).
    """
    limits: dict[str, int] = {}
    used: dict[str, int] = {}
    if host is not None:
        limit_on_host = host_limit()
        for device in ("cpu", "host"):
            limits[device], used[device] = limit_on_host.bytes, counted(limit_on_host, host)
    for reading in readings:
        if reading.device.startswith("cuda:") and reading.allocated is not None:
            limit = device_limit(int(reading.device[5:]))
            if limit is not None:
                limits[reading.device] = limit
                used[reading.device] = reading.allocated + passing.get(reading.device, 0)
    return limits, used


def device_limit(device: int) -> int | None:
    """Return the bytes of a device that this process's allocator may use: its cap, or what others leave."""
    cap = cuda.per_process_limit(device)
    total = cuda.capacity(device)
    used, reserved = driver.used(device), cuda.counters(device).reserved
    if total is None or used is None or reserved is None:
        return cap
    free_for_us = total - max(0, used - reserved)
    return free_for_us if cap is None else min(cap, free_for_us)
