"""From a timeline of the host to its peak by class, for a process and for a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memtriage.model.blocks import pinned_block
from memtriage.model.prediction import HOST_PEAK, HostCourse
from memtriage.prediction.host.malloc import Malloc
from memtriage.prediction.host.memory import PINNED, HostTrace, MemoryPlace
from memtriage.prediction.lifetimes import FREE

RETAINED: Final = "malloc retained"
LIBRARIES: Final = "libraries"
_DESCRIPTION: Final = 512
"""Bytes of the C++ objects of a tensor, which come after its data: they keep malloc from returning what is
below them."""


class HostReplay:
    """Resident bytes by class along a timeline."""

    def __init__(self, trace: HostTrace) -> None:
        self.by_class: dict[str, int] = {}
        self.files: dict[str, int] = {}
        self._trace = trace
        self._malloc = Malloc()
        self._pinned = PinnedCache()
        self._position = 0

    def advance(self, end: int) -> Iterator[int]:
        """Feed the events up to this index; the resident bytes after each allocation."""
        trace, malloc = self._trace, self._malloc
        while self._position < end:
            event = trace.events[self._position]
            self._position += 1
            block = trace.blocks[event.block]
            kind = trace.owners.get(event.block, block.kind)
            sign = -1 if event.size == FREE else 1
            self.by_class[kind] = self.by_class.get(kind, 0) + sign * block.size
            if block.file is not None:
                self.files[block.file] = self.files.get(block.file, 0) + sign * block.size
            if block.place is MemoryPlace.HEAP:
                if sign > 0:
                    malloc.malloc(event.block, block.size)
                    malloc.malloc(~event.block, _DESCRIPTION)
                else:
                    malloc.free(event.block, block.size)
                    malloc.free(~event.block, _DESCRIPTION)
            elif block.place is MemoryPlace.PINNED:
                self._pinned.change(event.block, block.size, sign)
            if sign > 0:
                yield self.resident

    @property
    def retained(self) -> int:
        return self._malloc.resident - self._malloc.in_use

    @property
    def resident(self) -> int:
        return sum(self.by_class.values()) + self.retained + self._pinned.beyond

    def classes(self) -> dict[str, int]:
        """Bytes by class now, largest first, with their sum as `peak`."""
        held = {
            **{kind: size for kind, size in self.by_class.items() if size},
            LIBRARIES: self._trace.libraries.own + self._trace.libraries.shared,
        }
        if self.retained:
            held[RETAINED] = self.retained
        if self._pinned.beyond:
            held[PINNED] = held.get(PINNED, 0) + self._pinned.beyond
        return with_peak(held)


class PinnedCache:
    """torch's allocator of pinned memory: powers of two, kept for good (ATen/core/CachingHostAllocator.h).

    Attributes:
        beyond: bytes beyond what is asked for: rounding and blocks that are free.
    """

    def __init__(self) -> None:
        self._free: dict[int, int] = {}  # how many blocks, by size
        self.beyond = 0

    def change(self, block: int, size: int, sign: int) -> None:
        """Allocate or free."""
        rounded = pinned_block(size)
        if sign < 0:
            self._free[rounded] = self._free.get(rounded, 0) + 1
            self.beyond += size
        elif self._free.get(rounded):
            self._free[rounded] -= 1
            self.beyond -= size
        else:
            self.beyond += rounded - size


def with_peak(held: dict[str, int]) -> dict[str, int]:
    """Bytes by class, largest first, and their sum."""
    ordered = dict(sorted(held.items(), key=lambda item: -item[1]))
    return {**ordered, HOST_PEAK: sum(held.values())}


def stretches(trace: HostTrace) -> list[dict[str, int]]:
    """Bytes by class when a process's resident set is largest, and their sum as `peak`, for each part of the
    program between collectives."""
    replay = HostReplay(trace)
    parts = []
    for end in [*trace.meetings, len(trace.events)]:
        highest, peak = replay.resident, replay.classes()
        for resident in replay.advance(end):
            if resident > highest:
                highest, peak = resident, replay.classes()
        parts.append(peak)
    return parts


def host_course(trace: HostTrace) -> HostCourse:
    """What the node's figures need of a rank."""
    libraries = trace.libraries
    return HostCourse(stretches=stretches(trace), shared=libraries.shared, launcher=libraries.launcher)


def highest(parts: list[dict[str, int]]) -> dict[str, int]:
    """The part with the largest resident set."""
    return max(parts, key=lambda part: part[HOST_PEAK])
