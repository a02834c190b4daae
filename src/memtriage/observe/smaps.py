"""`/proc/PID/smaps`: every mapping of the address space, with its class and its resident bytes.

Every size is in bytes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import Final, Literal

import msgspec

MappingClass = Literal[
    "library",
    "file",
    "shared",
    "shared anonymous",
    "heap",
    "anonymous",
    "stack",
    "device",
    "other",
]


class MemoryMapping(msgspec.Struct, frozen=True, gc=False):
    """One mapping of the address space.

    Attributes:
        start, end: addresses; `end` is the first byte after it.
        kind: its class.
        rss: resident bytes.
        anonymous: the part of `rss` without a file; in a private file mapping, pages copied on write.
        name: path or label of `/proc/self/smaps`, empty for unnamed anonymous memory.
    """

    start: int
    end: int
    kind: MappingClass
    rss: int
    anonymous: int
    name: str


class MemoryClasses(msgspec.Struct, frozen=True):
    """Resident memory by class of mapping; the classes never overlap and sum to `total`.

    Classes: `library` (files with an executable mapping, and shared objects), `file` (other mapped
    files), `shared` (tmpfs such as /dev/shm, memfd, System V), `shared anonymous` (shared mappings
    without a file, `/dev/zero (deleted)`: where `cudaHostAlloc` memory is), `heap` (brk heap, and glibc's
    arenas of other threads), `anonymous`, `stack` (main thread; other threads' stacks only if glibc names
    them, else they are anonymous), `device` (/dev/nvidia* and others), `other` (vdso and the like).

    Attributes:
        total: sum of `Rss` over all mappings. Pages of hugetlbfs are not part of RSS, nor of this.
        mappings: every mapping, in order of address.
    """

    total: int
    mappings: tuple[MemoryMapping, ...]

    def resident(self, kind: MappingClass) -> int:
        """Resident bytes of one class."""
        return sum(mapping.rss for mapping in self.mappings if mapping.kind == kind)

    def mapped(self, kind: MappingClass) -> int:
        """Bytes of address space of one class."""
        return sum(mapping.end - mapping.start for mapping in self.mappings if mapping.kind == kind)

    def copied(self, kind: MappingClass) -> int:
        """Resident bytes of one class that are private copies, which cannot be reclaimed without swap."""
        return sum(mapping.anonymous for mapping in self.mappings if mapping.kind == kind)

    def covering(self, start: int, end: int) -> Iterator[tuple[int, int, MemoryMapping]]:
        """The mapped parts of `[start, end)`: (start, end, mapping), in order of address."""
        index = max(bisect_right(self.mappings, start, key=attrgetter("start")) - 1, 0)
        while index < len(self.mappings) and self.mappings[index].start < end:
            mapping = self.mappings[index]
            index += 1
            low, high = max(start, mapping.start), min(end, mapping.end)
            if low < high:
                yield low, high, mapping


def parse_smaps(text: str, tmpfs: frozenset[str] = frozenset()) -> MemoryClasses:
    """Classify the mappings of a `smaps` file.

    Args:
        text: the file's text.
        tmpfs: devices (`00:1b`, as smaps writes them) of memory-backed file systems; files on these are
            shared memory wherever they are mounted.
    """
    regions = _regions(text)
    programs = {region.file for region in regions if "x" in region.permissions and region.inode}
    mappings = []
    for index, region in enumerate(regions):
        kind = _kind(region, programs, tmpfs)
        if kind == "anonymous" and _is_arena(region, regions[index + 1 : index + 2]):
            kind = "heap"
        mappings.append(
            MemoryMapping(region.start, region.end, kind, region.rss, region.anonymous, region.name)
        )
    return MemoryClasses(sum(mapping.rss for mapping in mappings), tuple(mappings))


class _SmapsEntry(msgspec.Struct, gc=False):
    """One entry of smaps, not yet classified."""

    start: int
    end: int
    permissions: str
    device: str
    inode: int
    name: str
    rss: int = 0
    anonymous: int = 0

    @property
    def file(self) -> tuple[str, int]:
        return self.device, self.inode


_SHARED_OBJECT: Final = re.compile(r"\.so(\.[\w.]+)?$")
_SHARED_PATHS: Final = ("/dev/shm/", "/run/shm/", "/memfd:", "/SYSV", "[anon_shmem:")
_STACKS: Final = ("[stack", "[anon: glibc: pthread stack")
_ARENA_NAME: Final = "[anon: glibc: malloc arena"
_ARENA_ALIGNMENT: Final = 64 << 20
"""`HEAP_MAX_SIZE` of glibc's arena.c on 64-bit machines: 2 * DEFAULT_MMAP_THRESHOLD_MAX."""


def _regions(text: str) -> list[_SmapsEntry]:
    regions: list[_SmapsEntry] = []
    for line in text.splitlines():
        if "A" <= line[:1] <= "Z":  # a field; addresses are written in lower case
            if line.startswith("Rss:"):
                regions[-1].rss = int(line[4:-2]) << 10
            elif line.startswith("Anonymous:"):
                regions[-1].anonymous = int(line[10:-2]) << 10
            continue
        columns = line.split(maxsplit=5)
        start, _, end = columns[0].partition("-")
        name = columns[5] if len(columns) == 6 else ""
        regions.append(
            _SmapsEntry(int(start, 16), int(end, 16), columns[1], columns[3], int(columns[4]), name)
        )
    return regions


def _kind(region: _SmapsEntry, programs: set[tuple[str, int]], tmpfs: frozenset[str]) -> MappingClass:
    name = region.name
    path = name.removesuffix(" (deleted)")
    if path == "/dev/zero":
        return "shared anonymous" if "s" in region.permissions else "anonymous"
    if name.startswith(_SHARED_PATHS):
        return "shared"
    if name.startswith(("/dev/", "anon_inode:", "/drm ")) and not name.startswith("/dev/hugepages"):
        return "device"
    if name.startswith("/"):
        if region.file in programs or _SHARED_OBJECT.search(path):
            return "library"
        return "shared" if region.device in tmpfs else "file"
    if name == "[heap]" or name.startswith(_ARENA_NAME):
        return "heap"
    if name.startswith(_STACKS):
        return "stack"
    if not name or name.startswith("[anon:"):
        return "anonymous"
    return "other"


def _is_arena(region: _SmapsEntry, following: list[_SmapsEntry]) -> bool:
    """Whether a mapping is a glibc arena of a thread: aligned, used from its start, the rest reserved.

    `new_heap` of glibc's arena.c maps 64 MiB at a multiple of 64 MiB without access, and opens it from the
    start. A full arena, or one merged with memory mapped just below it, is not recognized.
    """
    if region.name or not region.permissions.startswith("rw-p") or region.start % _ARENA_ALIGNMENT:
        return False
    return any(
        reserve.permissions == "---p"
        and not reserve.name
        and reserve.start == region.end
        and reserve.end % _ARENA_ALIGNMENT == 0
        and reserve.end - reserve.start < _ARENA_ALIGNMENT
        for reserve in following
    )


def tmpfs_devices(mountinfo: str) -> frozenset[str]:
    """Devices of tmpfs mounts, written as smaps writes them (hexadecimal), from mountinfo (decimal)."""
    devices = set()
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        if source.split(" ", 1)[0] in ("tmpfs", "ramfs"):
            major, _, minor = mount.split()[2].partition(":")
            devices.add(f"{int(major):02x}:{int(minor):02x}")
    return frozenset(devices)
