"""When memory of the host comes and goes: storages, parts of files, buffers of calls, workers."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from memtriage.prediction.lifetimes import FREE, LifetimeEvent, StorageReference

TENSORS: Final = "other tensors"
LOADED: Final = "loaded"
SAVED: Final = "copies for saving"
FILES: Final = "mapped files"
PINNED: Final = "pinned"
WORKERS: Final = "workers"
BATCHES: Final = "batches in shared memory"
OBJECTS: Final = "Python objects"
COMMUNICATION: Final = "communication buffer"


class MemoryPlace(Enum):
    """Where a block's memory comes from, which decides what happens to it when it is freed."""

    HEAP = "malloc"
    MAPPING = "its own mapping"
    PINNED = "torch's cache of pinned memory"


@dataclass(frozen=True, slots=True)
class HostBlock:
    """One allocation.

    Attributes:
        size: bytes.
        kind: its class, unless it turns out to be a parameter or the like.
        place: where its memory comes from.
        file: of a part of a file: which; its pages are shared by the processes of a node.
    """

    size: int
    kind: str
    place: MemoryPlace = MemoryPlace.HEAP
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Libraries:
    """What a process needs before it makes a tensor: the interpreter and what it has imported. Bytes.

    Attributes:
        own: each process has its own.
        shared: pages of files, which the processes of a node share.
        launcher: of the process that starts the ranks of a node.
    """

    own: int = 0
    shared: int = 0
    launcher: int = 0


@dataclass(slots=True)
class HostTrace:
    """The whole timeline.

    Attributes:
        events: allocations (of pages that are used) and frees, in program order; as in `AllocationTrace`.
        blocks: by number.
        meetings: indices of the first event after each collective.
        owners: classes of blocks that are parameters, gradients, states of optimizers or buffers.
        libraries: bytes before the program makes a tensor: of each process, and shared by those of a node.
    """

    events: list[LifetimeEvent] = field(default_factory=list)
    blocks: list[HostBlock] = field(default_factory=list)
    meetings: list[int] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    libraries: Libraries = field(default_factory=Libraries)


@dataclass(slots=True, eq=False)
class _StoragePages:
    """The pages of one storage: none before they are used."""

    reference: StorageReference
    size: int
    part: MappedFile | None
    place: MemoryPlace
    block: int | None = None
    owner: str | None = None


class MappedFile:
    """A mapping of a file. Its pages are there from their first use until no storage is left."""

    def __init__(self, memory: HostMemory, path: str) -> None:
        self.path = path
        self._memory = memory
        self._parts = 0
        self._blocks: list[int] = []

    def opened(self) -> None:
        self._parts += 1

    def used(self, size: int) -> int:
        block = self._memory.allocate(size, FILES, MemoryPlace.MAPPING, self.path)
        self._blocks.append(block)
        return block

    def closed(self) -> None:
        self._parts -= 1
        if not self._parts:
            for block in self._blocks:
                self._memory.free(block)
            self._blocks.clear()


class HostMemory:
    """Notes what a traced program allocates on the host.

    Attributes:
        trace: what was noted.
        kind: the class of what is allocated now.
        place: where the memory of storages that are made now comes from.
    """

    def __init__(self) -> None:
        self.trace = HostTrace()
        self.kind = TENSORS
        self.place = MemoryPlace.HEAP
        self._pages: dict[int, _StoragePages] = {}

    def pins(self, storage: Any) -> bool:
        """Whether it is page-locked."""
        pages = self._pages.get(storage._cdata)
        return pages is not None and pages.place is MemoryPlace.PINNED

    def knows(self, storage: Any) -> bool:
        """Whether it was noted."""
        return storage._cdata in self._pages

    def block_of(self, storage: Any) -> int | None:
        """The number of its block; None where it has no pages."""
        pages = self._pages.get(storage._cdata)
        return None if pages is None else pages.block

    def see(self, storage: Any, *, used: bool = True, part: MappedFile | None = None) -> None:
        """A storage that may be new; with `used`, its pages are there."""
        identity: int = storage._cdata
        if identity in self._pages:
            return
        reference = StorageReference(storage, self._gone)
        pages = self._pages[identity] = _StoragePages(reference, storage.nbytes(), part, self.place)
        if part is not None:
            part.opened()
        if used or pages.place is MemoryPlace.PINNED:  # locking touches all pages
            self._use(pages)

    def use(self, storage: Any, *, written: bool) -> None:
        """A storage is read or written: its pages come with the first use, those of no file with the first
        write."""
        pages = self._pages.get(storage._cdata)
        if pages is not None and pages.block is None and (written or pages.part is not None):
            self._use(pages)

    def resized(self, storage: Any) -> None:
        """The storage may have got another size, which replaces its memory."""
        pages = self._pages.get(storage._cdata)
        if pages is None or pages.size == storage.nbytes():
            return
        old, pages.block, pages.size = pages.block, None, storage.nbytes()
        if old is not None:
            self._use(pages)
            self.free(old)

    def allocate(
        self,
        size: int,
        kind: str | None = None,
        place: MemoryPlace = MemoryPlace.HEAP,
        file: str | None = None,
    ) -> int:
        """Memory of no storage; returns its number for `free`."""
        block = len(self.trace.blocks)
        self.trace.blocks.append(HostBlock(size, kind or self.kind, place, file))
        if size:
            self.trace.events.append(LifetimeEvent(block, size))
        return block

    def free(self, block: int) -> None:
        """Free it."""
        if self.trace.blocks[block].size:
            self.trace.events.append(LifetimeEvent(block, FREE))

    def follow(self, holder: Any, size: int, kind: str | None = None) -> None:
        """Memory of another object, until that object is gone; of a list or the like until the end."""
        block = self.allocate(size, kind, MemoryPlace.MAPPING)
        with suppress(TypeError):
            weakref.finalize(holder, self.free, block)

    def name(self, storage: Any, owner: str) -> None:
        """A storage is a parameter or the like, from now on and in all that was noted of it."""
        pages = self._pages.get(storage._cdata)
        if pages is None:
            return
        pages.owner = owner
        if pages.block is not None:
            self.trace.owners.setdefault(pages.block, owner)

    def meet(self) -> None:
        """A collective: all ranks are here."""
        self.trace.meetings.append(len(self.trace.events))

    def _use(self, pages: _StoragePages) -> None:
        if pages.part is None:
            pages.block = self.allocate(pages.size, place=pages.place)
        else:
            pages.block = pages.part.used(pages.size)
        if pages.owner is not None:
            self.trace.owners.setdefault(pages.block, pages.owner)

    def _gone(self, reference: StorageReference) -> None:
        pages = self._pages.pop(reference.identity)
        if pages.part is not None:
            pages.part.closed()
        elif pages.block is not None:
            self.free(pages.block)
