"""The statistics of torch's CUDA allocator in another process, read from its memory.

The allocator is found by the symbol that libc10_cuda exports. The place of a device's statistics in it
differs between versions of torch. Measuring that here would need a CUDA context, and so GPU memory that the
job may need. So they are found by their relations: nine counters, each the sum of its parts by pool, in the
order of `c10::CachingDeviceAllocator::DeviceStats`. What does not fit is not reported.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Final

from memtriage.model.blocks import DeviceCounters
from memtriage.outside.memory import ProcessMemory, RemoteMemory
from memtriage.outside.same_build import SharedFiles
from memtriage.outside.torch_layout import class_name, type_name_of
from memtriage.outside.values import Translate

_LIBRARY: Final = "libc10_cuda.so"
_ALLOCATOR: Final = "_ZN3c104cuda20CUDACachingAllocator9allocatorE"
"""`c10::cuda::CUDACachingAllocator::allocator`, an atomic pointer."""
_NATIVE: Final = "NativeCachingAllocator"
"""Its class unless `cudaMallocAsync` or a pluggable allocator is in use, which keep no such statistics."""
_OBJECT_WORDS: Final = 4096
"""Of the allocator, in which its list of devices is looked for: it is word 2,823 of torch 2.8 to 2.13, after
locks and tables of 67 parts and 1,001 pairs of times that translate the clock of its trace."""
_DEVICE_WORDS: Final = 512
"""Of a device's part, in which its statistics are looked for: a lock comes before."""
_MOST_DEVICES: Final = 128
_STAT: Final = 4
"""Words of a counter: now, peak, sum of increases, sum of decreases."""
_ARRAY: Final = 3 * _STAT
"""Of a counter for all, the small and the large pool."""
_FIRST: Final = 6 * _ARRAY
"""From allocations to reserved bytes."""
_LAST: Final = 3 * _ARRAY
"""Active, split and requested bytes, then two numbers."""
_NUMBERS: Final = 2
_WIDEST_GAP: Final = 12
"""Words between the two parts: since torch 2.13 a table of private pools is there."""
_SMALLEST_BLOCK: Final = 512
_READ_AGAIN: Final = 20
"""The job goes on while it is read: a reading with counters of two instants does not add up."""


class CudaAllocator:
    """Reads the statistics of a process's allocator as they are now.

    Args:
        allocator: address of the pointer to its allocator.
    """

    def __init__(self, memory: RemoteMemory, allocator: int) -> None:
        self._memory = memory
        self._pointer = allocator
        self._devices: list[int] = []
        self._at: tuple[int, int] | None = None

    def counters(self) -> dict[str, DeviceCounters]:
        """Return the counters of each device that the process uses; nothing where none can be read."""
        if self._at is None:
            self._find()
        if self._at is None:
            return {}
        found = {}
        for number, device in enumerate(self._devices):
            read = self._read(device, *self._at)
            if read is not None and read.reserved:
                found[f"cuda:{number}"] = read
        return found

    def _find(self) -> None:
        """Find the list of devices, and in them the only place where statistics can be."""
        allocator = self._words(self._pointer, 1)[0]
        if allocator < 4096 or allocator & 7:
            return
        table = self._words(allocator, 1)[0]
        mangled = type_name_of(self._memory.words, self._memory.text_bytes, table)
        if class_name(mangled) != _NATIVE:
            return
        words = self._words(allocator, _OBJECT_WORDS)
        for begin, end, capacity in zip(words, words[1:], words[2:], strict=False):
            size = end - begin
            if not 4096 < begin < end <= capacity or size % 8 or size > 8 * _MOST_DEVICES:
                continue
            devices = self._words(begin, size >> 3)
            if any(device < 4096 or device & 7 for device in devices):
                continue
            places = {place for device in devices for place in fitting(self._words(device, _DEVICE_WORDS))}
            if len(places) == 1:
                self._devices, self._at = devices, places.pop()
                return

    def _read(self, device: int, offset: int, gap: int) -> DeviceCounters | None:
        for _ in range(_READ_AGAIN):
            words = self._words(device + 8 * offset, _FIRST + gap + _LAST + _NUMBERS)
            counters = parse(words, gap)
            if counters is not None:
                return counters
        return None

    def _words(self, address: int, count: int) -> list[int]:
        """Return words as they are now."""
        import numpy as np

        words: list[int] = self._memory.live(np.array([address], np.int64), count)[0].tolist()
        return words


def fitting(words: Sequence[int]) -> list[tuple[int, int]]:
    """Return where statistics of a device that is in use can be: (first word, words in the gap) each.

    Args:
        words: from the start of the device's part on, signed.
    """
    found = []
    for offset in range(len(words) - _FIRST - _LAST - _NUMBERS):
        first = words[offset : offset + _FIRST]
        if not first[5 * _ARRAY] or not _adds_up(first):
            continue
        for gap in range(min(_WIDEST_GAP + 1, len(words) - offset - _FIRST - _LAST - _NUMBERS)):
            part = words[offset : offset + _FIRST + gap + _LAST + _NUMBERS]
            if parse(part, gap) is not None:
                found.append((offset, gap))
    return found


def parse(words: Sequence[int], gap: int) -> DeviceCounters | None:
    """Return the counters of a `DeviceStats`; None where these words are none of one instant.

    Args:
        words: signed, from its start to the number of out-of-memory errors.
        gap: words after the reserved bytes that are something else.
    """
    first, last = words[:_FIRST], words[_FIRST + gap : _FIRST + gap + _LAST]
    retries, ooms = words[_FIRST + gap + _LAST : _FIRST + gap + _LAST + _NUMBERS]
    if not _adds_up(first) or not _adds_up(last) or not 0 <= ooms < 1 << 32 or not 0 <= retries < 1 << 32:
        return None
    for pool in range(0, _ARRAY, _STAT):
        blocks, segments, active, split, allocated, reserved = first[pool::_ARRAY]
        active_bytes, split_bytes, requested = last[pool::_ARRAY]
        sums = (
            requested <= allocated <= active_bytes,
            active_bytes + split_bytes <= reserved,
            blocks <= active,
            _SMALLEST_BLOCK * blocks <= allocated,
            _SMALLEST_BLOCK * active <= active_bytes,
            _SMALLEST_BLOCK * (split + segments) <= split_bytes + reserved,
            (blocks == 0) is (allocated == 0),
            (active == 0) is (active_bytes == 0),
            (split == 0) is (split_bytes == 0),
            not (allocated | active_bytes | split_bytes | reserved) % _SMALLEST_BLOCK,
        )
        if not all(sums):
            return None
    return DeviceCounters(
        allocated=first[4 * _ARRAY],
        reserved=first[5 * _ARRAY],
        requested=last[2 * _ARRAY],
        active=last[0],
        peak_allocated=first[4 * _ARRAY + 1],
        peak_reserved=first[5 * _ARRAY + 1],
        retries=retries,
        ooms=ooms,
        inactive_split=last[_ARRAY],
    )


def _adds_up(words: Sequence[int]) -> bool:
    """Whether each counter is what its parts by pool add up to, and below its peak."""
    for at in range(0, len(words), _ARRAY):
        whole, small, large = (words[at + _STAT * pool : at + _STAT * (pool + 1)] for pool in range(3))
        if any(not 0 <= now <= peak for now, peak, _, _ in (whole, small, large)):
            return False
        if any(whole[part] != small[part] + large[part] for part in (0, 2, 3)):
            return False
    return True


def own_allocator() -> int | None:
    """Return where this process has the pointer to its allocator; None where torch has no CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or torch.__file__ is None:
        return None
    library = os.path.join(os.path.dirname(torch.__file__), "lib", _LIBRARY)
    if not os.path.exists(library):
        return None
    return ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.CDLL(library), _ALLOCATOR))


def allocator_of(pid: int) -> CudaAllocator | None:
    """Return the allocator of a process; None where its torch, or this one, has no CUDA.

    Raises:
        OutsideError: the process cannot be read, or has another build of Python.
    """
    own = own_allocator()
    if own is None:
        return None
    memory = ProcessMemory(pid)
    translate: Translate = SharedFiles(pid, memory.mappings).theirs
    there = translate(own)
    return None if there is None else CudaAllocator(memory, there)
