"""From a timeline of the host to its peak by class, for a process and for a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from memtriage.model.blocks import pinned_block
from memtriage.model.prediction import HOST_PEAK, HostCourse, Prediction
from memtriage.prediction.host.malloc import Malloc
from memtriage.prediction.host.memory import FILES, PINNED, HostTrace, MemoryPlace
from memtriage.prediction.lifetimes import FREE

RETAINED: Final = "malloc retained"
LIBRARIES: Final = "libraries"
LAUNCHER: Final = "launcher"
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


def add_node(prediction: Prediction, courses: list[HostCourse], ranks: int) -> None:
    """Give a prediction its `host_node`: rank 0, which often saves for all, and others like rank 1.

    Args:
        courses: of rank 0, and of rank 1 where there is one.
        ranks: of the node.
    """
    prediction.host_node = node(courses, ranks)
    if ranks > 1:
        prediction.notes.append(
            f"the node has {ranks} ranks of the job: rank 0, and {ranks - 1} that need as much as rank 1"
        )


def node(courses: list[HostCourse], ranks: int) -> dict[str, int]:
    """Bytes by class when the resident sets of a node's processes are largest, and their sum as `peak`.

    Args:
        courses: of rank 0 and of one that all others are like.
        ranks: of the node.
    """
    counts = [1, ranks - 1][: len(courses)]
    lengths = {len(course.stretches) for course in courses}
    if len(lengths) == 1:
        # Collectives are where all ranks are at the same place of the program.
        moments = [list(parts) for parts in zip(*(course.stretches for course in courses), strict=True)]
    else:
        moments = [[highest(course.stretches) for course in courses]]
    launcher = {LAUNCHER: courses[0].launcher} if ranks > 1 else {}
    return highest(
        [with_peak({**_together(parts, counts, courses[0].shared), **launcher}) for parts in moments]
    )


def _together(parts: list[dict[str, int]], counts: list[int], shared: int) -> dict[str, int]:
    held: dict[str, int] = {}
    for part, count in zip(parts, counts, strict=True):
        for kind, size in part.items():
            if kind == HOST_PEAK:
                continue
            if kind == FILES:
                held[kind] = max(held.get(kind, 0), size)  # pages of a file are there once
            else:
                held[kind] = held.get(kind, 0) + size * count
    held[LIBRARIES] -= shared * (sum(counts) - 1)
    return held
