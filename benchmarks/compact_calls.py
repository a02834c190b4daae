"""For `compact.py`: the driver's calls of a compaction, recorded, and made again alone."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Final

import torch

import memtriage
from memtriage.model.units import size

SMALL_SEGMENT: Final = 2 << 20
Call = tuple[str, int, int]
"""A call of the driver: `segment_alloc` or `segment_free`, address, bytes."""
Seconds = dict[str, float]
"""By kind of call, and in `all`."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What the allocator asked of the driver in one compaction.

    Attributes:
        segments: (address, bytes) of those that were there before.
        calls: in order.
    """

    segments: list[tuple[int, int]]
    calls: list[Call]

    def counts(self) -> dict[str, int]:
        return dict(Counter(action for action, _, _ in self.calls))


def recorded() -> Recording:
    """One compaction, with its calls."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000)
    try:
        segments = [(segment["address"], segment["total_size"]) for segment in torch.cuda.memory_snapshot()]
        memtriage.compact()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    wanted = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
    calls = [(event["action"], event["addr"], event["size"]) for event in trace if event["action"] in wanted]
    return Recording(sorted(segments), calls)


# Both replays begin with all segments that were there, made in the order of their addresses and written to
# once: what a call takes depends on what the driver has to look after.


def driver_seconds(recording: Recording) -> Seconds:
    """Seconds of the same calls alone, in the same order: by kind, and in `all`."""
    driver = ctypes.CDLL("libcuda.so.1")

    def allocate(nbytes: int) -> int:
        address = ctypes.c_uint64()
        status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        if status:
            raise RuntimeError(f"cuMemAlloc of {size(nbytes)} failed with status {status}")
        return address.value

    torch.cuda.empty_cache()
    there = {address: allocate(nbytes) for address, nbytes in recording.segments}
    for address, nbytes in recording.segments:
        write(driver, there[address], nbytes)
    torch.cuda.synchronize()
    spent: Seconds = defaultdict(float)
    for action, address, nbytes in recording.calls:
        began = time.perf_counter()
        if action == "segment_alloc":
            there[address] = allocate(nbytes)
        else:
            driver.cuMemFree_v2(ctypes.c_uint64(there.pop(address)))
        spent[action] += time.perf_counter() - began
    spent["all"] = sum(spent.values())
    for left in there.values():
        driver.cuMemFree_v2(ctypes.c_uint64(left))
    return spent


def allocator_seconds(recording: Recording) -> Seconds:
    """Seconds of the same calls when PyTorch's allocator makes them: by kind, and in `all`."""
    driver = ctypes.CDLL("libcuda.so.1")
    torch.cuda.empty_cache()
    there = {address: segment_of(nbytes) for address, nbytes in recording.segments}
    for address, nbytes in recording.segments:
        for block in there[address]:
            write(driver, block, nbytes // len(there[address]))
    spent: Seconds = defaultdict(float)
    for action, group in groupby(recording.calls, key=itemgetter(0)):
        several = list(group)
        if action != "segment_alloc":
            for _, address, _ in several:
                for block in there.pop(address):
                    torch.cuda.caching_allocator_delete(block)
        torch.cuda.synchronize()
        began = time.perf_counter()
        if action == "segment_alloc":
            there.update((address, segment_of(nbytes)) for _, address, nbytes in several)
        else:
            torch.cuda.empty_cache()
        spent[action] += time.perf_counter() - began
    spent["all"] = sum(spent.values())
    for blocks in there.values():
        for block in blocks:
            torch.cuda.caching_allocator_delete(block)
    torch.cuda.empty_cache()
    return spent


def write(driver: ctypes.CDLL, address: int, nbytes: int) -> None:
    driver.cuMemsetD8_v2(ctypes.c_uint64(address), ctypes.c_ubyte(1), ctypes.c_size_t(nbytes))


def segment_of(nbytes: int) -> list[int]:
    """Blocks that fill a new segment of some size: two where only the small pool makes such a one."""
    sizes = [nbytes] if nbytes > SMALL_SEGMENT else [nbytes // 2] * 2
    return [torch.cuda.caching_allocator_alloc(nbytes) for nbytes in sizes]


def seconds_to_empty(beside: bool) -> float:
    """Seconds in which the allocator gives all back that is free, from this thread or from a new one."""
    torch.cuda.synchronize()
    times: list[float] = []

    def empty() -> None:
        began = time.perf_counter()
        torch.cuda.empty_cache()
        times.append(time.perf_counter() - began)

    if beside:
        thread = threading.Thread(target=empty)
        thread.start()
        thread.join()
    else:
        empty()
    return times[0]
