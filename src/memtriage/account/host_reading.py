"""The host's counters at one instant, read before a census, because a census itself takes memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memtriage.account.host_ledger import TensorPlace, host_ledger, tensor_places
from memtriage.model.census import StorageRecord
from memtriage.model.ledger import CPU_TENSORS, SHARED_ROWS, Ledger, LedgerRow
from memtriage.observe import host, malloc
from memtriage.observe.host import PinnedStats
from memtriage.observe.malloc import MallocInfo
from memtriage.observe.malloc_arenas import MallocArena, malloc_arenas
from memtriage.observe.smaps import MappingClass, MemoryClasses


class HostReading(msgspec.Struct, frozen=True):
    """What the kernel, malloc, Python and torch say about this process's memory.

    A census of a process that has imported torch walks 200,000 objects and takes 40 MB meanwhile. Most of
    that stays with malloc and Python (measured). If the counters are read first, no ledger includes it.

    Attributes:
        classes: every mapping with its resident bytes.
        malloc: counters over all arenas; None if malloc is not glibc's.
        arenas: malloc's arenas one by one.
        pinned: torch's page-locked memory; None before CUDA is initialized.
        python_arenas: bytes of Python's object arenas; None if unknown.
    """

    classes: MemoryClasses
    malloc: MallocInfo | None
    arenas: tuple[MallocArena, ...]
    pinned: PinnedStats | None
    python_arenas: int | None

    def retained(self) -> int | None:
        """Free memory that malloc keeps and that is still resident; None if malloc does not say."""
        if self.malloc is None:
            return None
        return next((row.bytes for row in self.ledger(None).rows if row.row == "malloc retained"), 0)

    def other_memory(self, rows: Sequence[LedgerRow] = ()) -> dict[str, tuple[int, int]]:
        """Least and most bytes of memory that no census lists, by the counter that sees it.

        `host`: private memory that neither malloc nor Python gives out. Nothing says how much of malloc's
        memory was ever written: for the least it is all of it, for the most only the tensors. `shared`:
        shared memory without tensors, what is written and what is mapped. So a buffer that fills moves the
        least alone, up to what the most was before. The least may be below 0.

        Args:
            rows: of the ledger of this instant. Without any, there is no `shared`.
        """
        found = {}
        if self.malloc is not None and self.python_arenas is not None:
            given = self.classes.resident("anonymous") - self.python_arenas
            of_malloc = max(0, self.malloc.from_kernel - self.classes.mapped("heap"))
            tensors = sum(row.bytes for row in rows if row.row == CPU_TENSORS)
            written = max(0, tensors - self.classes.resident("heap"))
            found["host"] = given - of_malloc, given - written
        if rows:
            shared = sum(row.bytes for row in rows if row.row in SHARED_ROWS)
            kinds: tuple[MappingClass, ...] = ("shared", "shared anonymous")
            unwritten = sum(self.classes.mapped(kind) - self.classes.resident(kind) for kind in kinds)
            found["shared"] = shared, shared + unwritten
        return found

    def in_driver_memory(self, storage: StorageRecord) -> bool:
        """Whether a page-locked storage is from torch's allocator, not memory that others locked.

        `cudaHostAlloc` memory is shared anonymous memory; under `pinned_use_cuda_host_register` torch takes
        malloc's.
        """
        covered = self.classes.covering(storage.address, storage.address + storage.nbytes)
        kinds = {mapping.kind for _, _, mapping in covered}
        if kinds & {"heap", "anonymous"}:
            return malloc.has_own_mapping(storage.address, storage.nbytes) is not False
        return "shared anonymous" in kinds

    def places(self, storages: list[StorageRecord]) -> list[TensorPlace]:
        """Where the ledger counts each tensor."""
        return tensor_places(storages, self.classes, host.resident)

    def ledger(self, storages: list[StorageRecord] | None) -> Ledger:
        """The closed ledger of this instant.

        Args:
            storages: of a census at the same instant; None if none was taken.
        """
        return host_ledger(
            storages,
            self.classes,
            self.malloc,
            self.pinned,
            host.resident,
            self.python_arenas,
            of_malloc=malloc.has_own_mapping,
            arenas=self.arenas,
        )


def read_host() -> HostReading | None:
    """Read the counters now; None if there is no `/proc/self/smaps`.

    Takes as long as `observe.host.memory_classes`: 6 to 9 ms in a process that has imported torch.
    """
    counters, arenas = malloc.malloc_info(), malloc_arenas()
    pinned, python = host.pinned(), malloc.python_arenas()
    classes = host.memory_classes()
    return None if classes is None else HostReading(classes, counters, arenas, pinned, python)
