"""What a watch learned about host memory, for the judgment. Plain figures in bytes, None if unknown."""

from __future__ import annotations

from dataclasses import dataclass, field

from memtriage.model.paths import HolderPath


@dataclass(frozen=True, slots=True)
class Retention:
    """Free memory that malloc kept, at a mark between steps.

    Attributes:
        step: completed steps at that mark.
        resident: free but resident bytes.
        trimmable: the part that `malloc_trim(0)` would have returned.
        arenas: arenas of malloc that held some of it.
        rss: resident set at that mark.
    """

    step: int
    resident: int
    trimmable: int
    arenas: int
    rss: int


@dataclass(frozen=True, slots=True)
class WorkerGrowth:
    """What one child process un-shared while it was watched.

    Attributes:
        pid: process id.
        name: the kernel's name for it.
        copied: bytes of anonymous pages that were shared when first seen and private later.
        private: bytes of private pages at the end.
    """

    pid: int
    name: str
    copied: int
    private: int


@dataclass(frozen=True, slots=True)
class Population:
    """A container of many Python objects in the parent, which workers un-share by counting references.

    Attributes:
        path: its holder path.
        kind: its type's name.
        entries: how many.
        nbytes: estimated bytes of the entries, from a sample of them.
    """

    path: HolderPath
    kind: str
    entries: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PinnedBlock:
    """One live page-locked tensor of torch's own allocator: its requested size, and its holder path."""

    nbytes: int
    path: HolderPath | None


@dataclass(frozen=True, slots=True)
class PinnedUse:
    """Page-locked memory at the last census.

    Attributes:
        blocks: live tensors of torch's allocator.
        owned: what that allocator has from the driver, rounded.
        torch_version: for the advice; its allocators differ.
    """

    blocks: tuple[PinnedBlock, ...]
    owned: int
    torch_version: str


@dataclass(frozen=True, slots=True)
class Pressure:
    """The sampled instant at which the control group was fullest.

    Attributes:
        usage: bytes charged to the group, without page cache that would be reclaimed first.
        limit: the group's limit.
        available: memory that the machine still had.
        job: proportional set sizes of this process and its children.
    """

    usage: int
    limit: int
    available: int
    job: int


@dataclass(frozen=True, slots=True)
class SharedMemoryUse:
    """The sampled instant at which `/dev/shm` was fullest.

    Attributes:
        used, total: of the file system, by all processes that see it.
        grown: bytes by which `used` has risen since the watch began.
    """

    used: int
    total: int
    grown: int


@dataclass(slots=True)
class HostEvidence:
    """All of it, at the end of a watch.

    Attributes:
        highest_rss: highest resident set at any mark.
        peak_rss: highest resident set ever, as the kernel counts it (`VmHWM`).
        mapped_files: resident bytes of mapped files other than libraries.
        mapped_files_first: the same at the first reading.
        retention: the last time that malloc kept much; None if it never did.
        taken_by_steps: most bytes that a step took from malloc in addition to what was in use before it, seen
            when backward passes begin and now and then in between; None if not read.
        workers: children that un-shared memory.
        population: the largest container of Python objects, seen while children ran.
        pinned: page-locked memory; None without CUDA.
        pressure: None without a control group limit.
        shared_memory: None without `/dev/shm`.
        swapped: most bytes of this process and its children that were swapped out.
    """

    highest_rss: int | None = None
    peak_rss: int | None = None
    mapped_files: int | None = None
    mapped_files_first: int | None = None
    retention: Retention | None = None
    taken_by_steps: int | None = None
    workers: list[WorkerGrowth] = field(default_factory=list)
    population: Population | None = None
    pinned: PinnedUse | None = None
    pressure: Pressure | None = None
    shared_memory: SharedMemoryUse | None = None
    swapped: int = 0
