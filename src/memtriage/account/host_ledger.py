"""The closed ledger of host memory: rows that never overlap and sum to the process's resident set.

The address space is divided twice: by mapping (the kernel's figures for libraries, files, shared memory, the
heap, ...) and, inside mappings, by tensor (the census's storages, resident bytes only). Other memory of
malloc and Python is placed in the rest of the heap and of anonymous memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, get_args

import msgspec

from memtriage.model.census import Owner, StorageRecord
from memtriage.model.ledger import CPU_TENSORS, MALLOC_IN_USE, PYTHON_OBJECTS, Ledger, LedgerRow
from memtriage.model.paths import HolderPath
from memtriage.model.units import size
from memtriage.observe.host import PinnedStats
from memtriage.observe.malloc import MallocInfo
from memtriage.observe.malloc_arenas import MallocArena
from memtriage.observe.smaps import MappingClass, MemoryClasses, MemoryMapping

ResidentBytes = Callable[[int, int], int | None]
"""(address, bytes) -> resident bytes of that range; None if unknown."""

OfMalloc = Callable[[int, int], bool | None]
"""(address, bytes) -> whether malloc gave that block a separate mapping; None if unknown."""


def host_ledger(
    storages: Iterable[StorageRecord] | None,
    classes: MemoryClasses,
    malloc: MallocInfo | None,
    pinned: PinnedStats | None,
    resident: ResidentBytes,
    python_arenas: int | None = None,
    *,
    of_malloc: OfMalloc | None = None,
    arenas: Sequence[MallocArena] = (),
) -> Ledger:
    """Divide the resident set among tensors by owner, allocators, libraries, files and shared memory.

    Take `classes`, `malloc` and the storages together, while nothing trains. A storage whose address was not
    mapped when `classes` was read is left out; its bytes are not in the total either.

    The classes of mappings and the tensors' resident bytes are measured. The rows of malloc and Python and
    unused pinned memory come from counters that do not say where the bytes are; they never take more than
    what is left of their mappings. The row `unexplained` appears if the measured rows miss the total, e.g. if
    tensors count pages that RSS leaves out.

    Args:
        storages: live storages of any device; only those of the CPU are used. If two overlap (over the same
            memory), the shared bytes count once, for the one that begins first. None if no census was taken:
            then tensors are part of the allocators' rows.
        classes: `observe.host.memory_classes()`; its total is the ledger's.
        malloc: `observe.malloc.malloc_info()`.
        pinned: `observe.host.pinned()`.
        resident: `observe.host.resident`.
        python_arenas: `observe.malloc.python_arenas()`; None puts them into `other anonymous memory`.
        of_malloc: `observe.malloc.has_own_mapping`; None if every tensor in anonymous memory is malloc's.
        arenas: `observe.malloc_arenas.malloc_arenas()`, for the detail on what a trim returns.
    """
    counted = storages is not None
    tensors = [_measured(piece, resident, of_malloc) for piece in _pieces(storages or (), classes)]
    left = _Unassigned({kind: classes.resident(kind) for kind in get_args(MappingClass)})
    for tensor in tensors:
        left.take(tensor.mapping.kind, tensor.resident)
    rows = [
        *_tensor_rows(tensors),
        *_pinned_rows(tensors, counted, pinned, left),
        *_allocator_rows(tensors, counted, malloc, pinned, python_arenas, arenas, left),
        *_mapping_rows(classes, left),
    ]
    rows = [row for row in rows if row.bytes]
    missing = classes.total - sum(row.bytes for row in rows)
    if missing:
        detail = "what the other rows miss of the total; below 0 when they exceed it"
        rows.append(LedgerRow(row="unexplained", bytes=missing, detail=detail))
    return Ledger(device="host", total=classes.total, source="/proc/self/smaps", rows=rows)


class TensorPlace(NamedTuple):
    """Where a storage (or its part in one mapping) is counted, and how much of it is resident."""

    address: int
    nbytes: int
    row: str
    owner: Owner
    resident: int
    path: HolderPath | None


def tensor_places(
    storages: Iterable[StorageRecord], classes: MemoryClasses, resident: ResidentBytes
) -> list[TensorPlace]:
    """The tensors in `host_ledger`, one by one; arguments as there."""
    measured = [_measured(piece, resident, None) for piece in _pieces(storages, classes)]
    return [
        TensorPlace(
            tensor.start, tensor.nbytes, _place(tensor), tensor.storage.owner, tensor.resident,
            tensor.storage.path,
        )
        for tensor in measured
    ]  # fmt: skip


class _Piece(NamedTuple):
    """The part of a storage that is in one mapping and is not counted for an earlier storage."""

    storage: StorageRecord
    start: int
    end: int
    mapping: MemoryMapping


class _Tensor(NamedTuple):
    """A piece and how much of it is resident; `malloced`: malloc counts it as in use."""

    storage: StorageRecord
    mapping: MemoryMapping
    start: int
    nbytes: int
    resident: int
    assumed: bool
    malloced: bool


class _Unassigned(msgspec.Struct):
    """Resident bytes of each class of mapping that no row has yet; never below 0."""

    bytes: dict[MappingClass, int]

    def take(self, kind: MappingClass, wanted: int) -> int:
        """Take up to `wanted` bytes; return how many were taken."""
        taken = max(min(wanted, self.bytes[kind]), 0)
        self.bytes[kind] -= taken
        return taken


_STRENGTH: Final = {owner: rank for rank, owner in enumerate(get_args(Owner))}
_MALLOC_KINDS: Final[tuple[MappingClass, ...]] = ("heap", "anonymous")
_PAGE: Final = 4096
"""A smaller block of malloc shares a page with its header, which is written: so it is resident."""


def _pieces(storages: Iterable[StorageRecord], classes: MemoryClasses) -> Iterator[_Piece]:
    """Cut CPU storages at the borders of mappings, and count every byte for one storage only.

    The storage that begins first gets the bytes; if two begin together, the one whose owner says more.
    """
    on_cpu = [item for item in storages if item.device == "cpu" and item.address > 0 and item.nbytes > 0]
    on_cpu.sort(key=lambda item: (item.address, _STRENGTH[item.owner], -item.nbytes))
    given = 0
    for storage in on_cpu:
        end = storage.address + storage.nbytes
        for low, high, mapping in classes.covering(max(storage.address, given), end):
            yield _Piece(storage, low, high, mapping)
        given = max(given, end)


def _measured(piece: _Piece, resident: ResidentBytes, of_malloc: OfMalloc | None) -> _Tensor:
    nbytes = piece.end - piece.start
    known = piece.storage.pinned or nbytes < _PAGE  # page-locked memory is resident
    in_memory = nbytes if known else resident(piece.start, nbytes)
    assumed = in_memory is None
    if in_memory is None:
        in_memory = nbytes
    if assumed or piece.mapping.kind == "device":  # a driver's pages may be present but not in RSS
        in_memory = min(in_memory, piece.mapping.rss)
    in_memory = max(min(in_memory, nbytes), 0)
    malloced = _is_malloced(piece, of_malloc)
    return _Tensor(piece.storage, piece.mapping, piece.start, nbytes, in_memory, assumed, malloced)


def _is_malloced(piece: _Piece, of_malloc: OfMalloc | None) -> bool:
    """Whether malloc counts a piece as in use.

    Memory that a program maps itself begins at a page. malloc's blocks rarely do, because their header comes
    first; but a storage in the middle of a block (an array's slice) may begin anywhere.
    """
    if piece.mapping.kind not in _MALLOC_KINDS:
        return False
    if piece.mapping.kind == "heap" or of_malloc is None or piece.storage.address % _PAGE:
        return True
    return of_malloc(piece.storage.address, piece.storage.nbytes) is not False


def _tensor_rows(tensors: list[_Tensor]) -> list[LedgerRow]:
    """One row per kind of place and owner, largest first."""
    groups: dict[tuple[str, Owner], list[_Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[_place(tensor), tensor.storage.owner].append(tensor)
    rows = [
        LedgerRow(
            row=place, bytes=sum(item.resident for item in group), owner=owner, detail=_tensor_detail(group)
        )
        for (place, owner), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _place(tensor: _Tensor) -> str:
    if tensor.storage.pinned:
        return "pinned tensors"
    if tensor.mapping.kind in ("shared", "shared anonymous"):
        return "tensors in shared memory"
    if tensor.mapping.kind in ("file", "library"):
        return "tensors in mapped files"
    return CPU_TENSORS


def _tensor_detail(group: list[_Tensor]) -> str:
    count = len({(item.storage.address, item.storage.nbytes) for item in group})
    parts = [f"{count} storage" if count == 1 else f"{count} storages"]
    largest = max(group, key=lambda item: item.resident)
    if largest.storage.named:
        parts.append(f"largest kept alive by {largest.storage.named}")
    untouched = sum(item.nbytes - item.resident for item in group)
    if untouched:
        parts.append(f"{size(untouched)} more allocated and not resident")
    if any(item.assumed for item in group):
        parts.append("counted in full: the kernel does not report what is resident")
    return "; ".join(parts)


def _pinned_rows(
    tensors: list[_Tensor], counted: bool, pinned: PinnedStats | None, left: _Unassigned
) -> Iterator[LedgerRow]:
    """Page-locked memory that torch's allocator holds beyond live pinned tensors.

    `cudaHostAlloc` memory is shared anonymous memory (measured on an H200, CUDA 13); under
    `pinned_use_cuda_host_register` it comes from malloc.
    """
    if pinned is None:
        return
    kinds: tuple[MappingClass, ...] = ("shared anonymous",)
    if _registered(tensors, pinned):
        kinds = ("anonymous", "heap")
    live = sum(item.nbytes for item in tensors if item.storage.pinned and item.mapping.kind in kinds)
    for row, wanted, detail in _pinned_parts(pinned, live, counted):
        yield LedgerRow(row=row, bytes=_take_in_turn(left, kinds, wanted), detail=detail)


def _pinned_parts(pinned: PinnedStats, live: int, counted: bool) -> list[tuple[str, int, str]]:
    """(row, bytes, detail) of what torch's allocator has in addition to `live` bytes of tensors."""
    used = "rounding to powers of two; blocks that only C++ holds, or that wait for a stream"
    kept = "free, kept by torch's pinned-memory allocator; torch._C._host_emptyCache() returns it"
    if not counted:
        used = f"tensors (no census was taken); {used}"
    if pinned.active is None or pinned.cached is None:
        row = "pinned rounding and cached" if counted else "pinned memory"
        return [(row, pinned.owned - live, f"{used}; {kept} (this torch does not distinguish them)")]
    row = "pinned rounding" if counted else "pinned in use"
    return [(row, pinned.active - live, used), ("pinned cached", pinned.cached, kept)]


def _registered(tensors: list[_Tensor], pinned: PinnedStats | None) -> bool:
    """Whether torch's pinned memory comes from malloc, inferred from where the live pinned tensors are.

    Memory that others registered with CUDA is also anonymous, but not in torch's counters.
    """
    seen = [tensor for tensor in tensors if tensor.storage.pinned]
    in_malloc = sum(tensor.nbytes for tensor in seen if tensor.mapping.kind in _MALLOC_KINDS)
    elsewhere = any(tensor.mapping.kind == "shared anonymous" for tensor in seen)
    return pinned is not None and 0 < in_malloc <= pinned.owned and not elsewhere


def _take_in_turn(left: _Unassigned, kinds: tuple[MappingClass, ...], wanted: int) -> int:
    taken = 0
    for kind in kinds:
        taken += left.take(kind, wanted - taken)
    return taken


def _allocator_rows(
    tensors: list[_Tensor],
    counted: bool,
    malloc: MallocInfo | None,
    pinned: PinnedStats | None,
    python_arenas: int | None,
    arenas: Sequence[MallocArena],
    left: _Unassigned,
) -> Iterator[LedgerRow]:
    """What malloc and Python hold in addition to tensors.

    malloc counts its blocks whether touched or not, so tensors are subtracted with their full size. Free is
    what remains of the resident heap: after `malloc_trim`, malloc still counts the free chunks, but their
    pages are gone.
    """
    python = left.take("anonymous", python_arenas or 0)
    in_use = retained = 0
    if malloc is not None:
        accounted = _from_malloc(tensors, pinned)
        in_use += left.take("heap", malloc.in_use - malloc.mapped - accounted["heap"])
        in_use += left.take("anonymous", malloc.mapped - accounted["anonymous"])
        retained = left.take("heap", malloc.free)
    others = "numpy arrays, C++ objects, Python objects above 512 bytes, malloc's own headers"
    yield LedgerRow(
        row=MALLOC_IN_USE,
        bytes=in_use,
        detail=others if counted else f"tensors (no census was taken), {others}",
    )
    yield LedgerRow(
        row="malloc retained",
        bytes=retained,
        detail=_retained_detail(retained, arenas),
    )
    yield LedgerRow(row=PYTHON_OBJECTS, bytes=python, detail="arenas of Python's object allocator")
    yield LedgerRow(
        row="other anonymous memory",
        bytes=left.take("anonymous", left.bytes["anonymous"]) + left.take("heap", left.bytes["heap"]),
        detail=_rest_detail(malloc, python_arenas),
    )


def _retained_detail(retained: int, arenas: Sequence[MallocArena]) -> str:
    if not arenas:
        return "free, kept by the C library; malloc_trim(0) returns most of it"
    trimmable = min(sum(arena.trimmable for arena in arenas), retained)
    where = "1 arena" if len(arenas) == 1 else f"{len(arenas)} arenas"
    return f"free, kept by the C library in {where}; memtriage.malloc_trim() would return {size(trimmable)}"


def _from_malloc(tensors: list[_Tensor], pinned: PinnedStats | None) -> dict[MappingClass, int]:
    """Bytes in the rows of tensors and pinned memory that malloc counts as in use, by class of mapping."""
    registered = _registered(tensors, pinned)
    accounted: dict[MappingClass, int] = dict.fromkeys(_MALLOC_KINDS, 0)
    from_torch = 0
    for tensor in tensors:
        if tensor.malloced and (registered or not tensor.storage.pinned):
            accounted[tensor.mapping.kind] += tensor.nbytes
            from_torch += tensor.nbytes if tensor.storage.pinned else 0
    if registered and pinned is not None:  # the rest of its blocks; large ones have their own mappings
        accounted["anonymous"] += max(pinned.owned - from_torch, 0)
    return accounted


def _rest_detail(malloc: MallocInfo | None, python_arenas: int | None) -> str:
    parts = ["threads' stacks", "libraries' zero-initialized data", "memory mapped without malloc"]
    if python_arenas is None:
        parts.insert(0, "Python's object arenas")
    if malloc is None:
        parts.insert(0, "malloc's memory outside tensors (no counters for this C library)")
    return ", ".join(parts)


def _mapping_rows(classes: MemoryClasses, left: _Unassigned) -> Iterator[LedgerRow]:
    """The parts of libraries, files, shared memory, stacks and devices that are not tensors."""
    yield LedgerRow(row="libraries", bytes=left.bytes["library"], detail="code and data of shared objects")
    copied = min(classes.copied("file"), left.bytes["file"])
    yield LedgerRow(
        row="mapped files",
        bytes=left.bytes["file"],
        detail="memory-mapped data sets and the like: reclaimable, not a leak"
        + (f"; but {size(copied)} copied on write is not reclaimable" if copied else ""),
    )
    yield LedgerRow(
        row="shared memory",
        bytes=left.bytes["shared"],
        detail="/dev/shm, memfd, System V: counted in every process that maps it, not reclaimable",
    )
    yield LedgerRow(
        row="shared anonymous memory",
        bytes=left.bytes["shared anonymous"],
        detail="page-locked memory of the CUDA driver, mmap(-1)",
    )
    yield LedgerRow(row="stacks", bytes=left.bytes["stack"], detail="main thread")
    yield LedgerRow(
        row="device mappings", bytes=left.bytes["device"], detail="/dev/nvidia* and other devices"
    )
    yield LedgerRow(row="other mappings", bytes=left.bytes["other"], detail="vdso and other kernel mappings")
