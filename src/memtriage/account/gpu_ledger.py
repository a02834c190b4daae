"""The closed GPU ledger: every byte in use on a device in exactly one row.

    device used = this process's segments + what it has outside them + other processes + nobody visible
    segments    = requested + rounding + awaiting stream events + releasable + stranded

Pure: no torch, no driver. Sizes are bytes. Known limitations: the allocator, the storages and the driver are
read one after the other; changes in between go into the row `unexplained`. If a live storage is in a block
that is already freed (a dangling pointer from outside), the block's state counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from memtriage.account.claims import Claim, OwnedPart, disjoint_claims, holder_of, outside_segments, overlaps
from memtriage.account.ledger_words import NAMED_PARTS, biggest, count_of, join, pool_list, pools_of, row_of
from memtriage.account.segments import releasable_in, segment_totals, stranded_segments
from memtriage.account.workspaces import (
    DEFAULT_WORKSPACES,
    HANDLES_PER_STREAM,
    WorkspaceSizes,
    cublas_blocks,
    workspace_sizes,
)
from memtriage.catalogue.pytorch import CUBLAS_WORKSPACES
from memtriage.model.blocks import DEFAULT_POOL, Block, DriverUse, Segment
from memtriage.model.census import StorageRecord
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.units import size as in_words

__all__ = [
    "CPP_ONLY",
    "CUBLAS",
    "STRANDED",
    "gpu_ledger",
    "outside_allocator",
    "releasable_in",
    "segment_totals",
    "stranded_segments",
    "workspace_sizes",
]

REQUESTED: Final = "requested"
ROUNDING: Final = "rounding"
AWAITING: Final = "awaiting stream events"
RELEASABLE: Final = "releasable"
STRANDED: Final = "stranded"
FOREIGN: Final = "foreign memory"
CONTEXT: Final = "context"
OUTSIDE: Final = "outside the allocator"
OTHERS: Final = "other processes"
NOBODY: Final = "no visible process"
UNEXPLAINED: Final = "unexplained"

CPP_ONLY: Final = "c++ only"
CUBLAS: Final = "cuBLAS workspace"


def outside_allocator(use: DriverUse, reserved: int) -> int:
    """Return bytes in use that this process's allocator did not reserve, to take as a baseline.

    If the driver reports this process's use, these are its context, kernels and libraries. If it does not,
    other processes cannot be distinguished, and their bytes are included. Never negative.
    """
    own = _own(use, reserved)
    return max(0, (use.used if own is None else own) - reserved)


def gpu_ledger(
    device: str,
    segments: Iterable[Segment] | None,
    storages: Iterable[StorageRecord] | None,
    use: DriverUse,
    context_baseline: int | None = None,
    *,
    workspaces: WorkspaceSizes = DEFAULT_WORKSPACES,
) -> Ledger:
    """Return the ledger of one device; its rows sum to `use.used`.

    Args:
        device: `cuda:N`.
        segments: the allocator's segments (those of other devices are left out); None for an allocator
            without segments (`cudaMallocAsync`): then storages are `requested` and the rest is outside.
        storages: live storages (those of other devices are left out). If two overlap, the bytes belong to the
            one that begins first. None if no census was taken: then `requested` has no owner.
        use: the driver's figures.
        context_baseline: `outside_allocator` when the device was first seen; growth since then has its own
            row.
        workspaces: sizes by which a cuBLAS workspace is recognized.
    """
    index = int(device.partition(":")[2])
    on_device = sorted((s for s in segments or () if s.device == index), key=lambda s: s.address)
    claims = disjoint_claims(storage for storage in storages or () if storage.device == device)
    beyond = outside_segments(claims, on_device)
    if segments is None:
        inside = _owner_rows(beyond)
        outside = _outside_rows(use, sum(part.size for part in beyond), context_baseline)
    else:
        inside = _allocator_rows(on_device, None if storages is None else claims, workspaces)
        outside = _outside_rows(use, sum(segment.size for segment in on_device), context_baseline)
        outside = _carve_foreign(outside, beyond)
    rows = [row for row in inside + outside if row.bytes]
    difference = use.used - sum(row.bytes for row in rows)
    if difference:
        detail = "the allocator and the driver were read at different instants, or disagree"
        rows.append(LedgerRow(row=UNEXPLAINED, bytes=difference, detail=detail))
    return Ledger(device=device, total=use.used, source=use.source, rows=rows)


# --- rows of the segments -----------------------------------------------------------------------------------


def _allocator_rows(
    segments: Sequence[Segment], claims: Sequence[Claim] | None, workspaces: WorkspaceSizes
) -> list[LedgerRow]:
    """Return the rows of the segments' bytes; without claims the owner of a block is unknown."""
    labels: dict[int, str] = {}
    parts: list[OwnedPart] = []
    unclaimed: list[tuple[Segment, Block, int]] = []
    for segment in segments:
        for block in segment.blocks:
            if block.state != "active":
                continue
            unclaimed_bytes = block.requested
            for claim, shared in overlaps(claims or (), block.address, block.address + block.requested):
                owner, holder = claim.storage.owner, holder_of(claim.storage)
                parts.append(OwnedPart(segment.pool, owner, holder, shared))
                labels.setdefault(block.address, f"{holder} ({owner})")
                unclaimed_bytes -= shared
            if unclaimed_bytes:
                unclaimed.append((segment, block, unclaimed_bytes))
    wholly_unclaimed = [
        (segment, block)
        for segment, block, unclaimed_bytes in unclaimed
        if unclaimed_bytes == block.requested
    ]
    recognized = frozenset[int]() if claims is None else cublas_blocks(wholly_unclaimed, workspaces)
    owner_unknown = None if claims is None else CPP_ONLY
    for segment, block, unclaimed_bytes in unclaimed:
        if block.address in recognized:
            part = _workspace_part(segment, block)
            labels[block.address] = f"{CUBLAS} ({CUBLAS_WORKSPACES})"
        else:
            part = _unclaimed_part(segment, block, unclaimed_bytes, owner_unknown)
            labels.setdefault(block.address, part.label)
        parts.append(part)
    return _owner_rows(parts) + _state_rows(segments, labels)


def _workspace_part(segment: Segment, block: Block) -> OwnedPart:
    reason = (
        f"{CUBLAS_WORKSPACES}: recognized by size ({block.requested:,} bytes) and stream "
        f"({segment.stream:#x}, at most {HANDLES_PER_STREAM} of this size), held by no storage that was found"
    )
    return OwnedPart(segment.pool, CUBLAS, reason, block.requested)


def _unclaimed_part(segment: Segment, block: Block, left: int, owner: str | None) -> OwnedPart:
    if left < block.requested:
        return OwnedPart(segment.pool, owner, "rest of a block of which a storage covers a part", left)
    label = f"allocated at {block.site}" if block.site else "allocation site not recorded"
    return OwnedPart(segment.pool, owner, label, left)


def _owner_rows(parts: Iterable[OwnedPart]) -> list[LedgerRow]:
    """Return a `requested` row per owner, separately for default and private pools; biggest first."""
    groups: defaultdict[tuple[str | None, bool], list[OwnedPart]] = defaultdict(list)
    for part in parts:
        groups[part.owner, part.pool != DEFAULT_POOL].append(part)
    rows = [
        LedgerRow(
            row=REQUESTED,
            bytes=sum(part.size for part in group),
            owner=owner,
            detail=join(pools_of(group), biggest((part.label, part.size) for part in group)),
        )
        for (owner, _private), group in groups.items()
    ]
    # What has no name comes last, whatever its size: readers look for the named rows.
    return sorted(rows, key=lambda row: (row.owner in (CPP_ONLY, None), -row.bytes))


def _state_rows(segments: Sequence[Segment], labels: dict[int, str]) -> list[LedgerRow]:
    """Return rounding, awaiting, releasable and stranded, for the default pool and for the private ones."""
    private = [segment for segment in segments if segment.pool != DEFAULT_POOL]
    default = [segment for segment in segments if segment.pool == DEFAULT_POOL]
    rows: list[LedgerRow] = []
    for group, pools in ((default, None), (private, pool_list(private))):
        totals = segment_totals(group)
        kept = "a pool keeps its emptied segments for as long as it lives" if pools else None
        pages = _page_remark(group)
        rows += [
            row_of(ROUNDING, totals.rounding, pools, "block sizes above what was asked for"),
            row_of(
                AWAITING,
                totals.awaiting,
                pools,
                "freed, but a stream that used it is not yet past that point",
            ),
            row_of(RELEASABLE, totals.releasable, pools, kept or "empty_cache() returns it", pages),
            row_of(STRANDED, totals.stranded, pools, _worst_pinned(group, labels), pages),
        ]
    order = (ROUNDING, AWAITING, RELEASABLE, STRANDED)
    return sorted(rows, key=lambda row: order.index(row.row))


def _worst_pinned(segments: Sequence[Segment], labels: dict[int, str]) -> str | None:
    stranded = stranded_segments(segments)
    worst = [
        f"{in_words(segment.stranded)} free in a segment of {in_words(segment.segment.size)} pinned by "
        f"{count_of(len(segment.pins), 'block')} of {in_words(sum(pin.size for pin in segment.pins))}, "
        f"the biggest {_pin(segment.pins[0], labels)}"
        for segment in stranded[:NAMED_PARTS]
    ]
    return join(count_of(len(stranded), "segment"), *worst)


def _pin(block: Block, labels: dict[int, str]) -> str:
    if block.state == "awaiting":
        return "awaiting a stream"
    return labels.get(block.address, "of unknown holder")


def _page_remark(segments: Sequence[Segment]) -> str | None:
    pages = sorted({segment.page for segment in segments if segment.page is not None})
    if not pages:
        return None
    return f"expandable segments: estimated in pages of {' and '.join(in_words(page) for page in pages)}"


# --- rows outside the segments ------------------------------------------------------------------------------


def _own(use: DriverUse, reserved: int) -> int | None:
    """Return the driver's figure for this process; None if it is less than the allocator holds.

    Then it is another process's figure: ids of a container and of its host can coincide.
    """
    return use.own if use.own is not None and use.own >= reserved else None


def _outside_rows(use: DriverUse, reserved: int, baseline: int | None) -> list[LedgerRow]:
    outside = outside_allocator(use, reserved)
    own = _own(use, reserved)
    shared = (
        None if own is not None else "includes other processes: the driver does not report this one's use"
    )
    at_first = min(baseline or 0, outside)
    since = "grown since the device was first seen: kernels, libraries, NCCL"
    rows = [
        row_of(
            CONTEXT, at_first, "CUDA context, kernels and libraries when the device was first seen", shared
        ),
        row_of(
            OUTSIDE,
            outside - at_first,
            "context, kernels, libraries, NCCL" if baseline is None else since,
            shared,
        ),
    ]
    return rows if own is None else rows + _other_rows(use, own)


def _other_rows(use: DriverUse, own: int) -> list[LedgerRow]:
    known = sum(size or 0 for _pid, size in use.processes)
    rest = max(0, use.used - own - known)
    listed = biggest((f"pid {pid}", size) for pid, size in use.processes if size is not None)
    without_size = [pid for pid, size in use.processes if size is None]
    if without_size:
        remark = (
            f"of {count_of(len(without_size), 'process', 'processes')} the driver does not report the size"
        )
        return [row_of(OTHERS, known + rest, listed, remark, "memory of no visible process is included")]
    return [
        row_of(OTHERS, known, listed),
        row_of(NOBODY, rest, "the driver itself, a process of another container, or one that ended badly"),
    ]


def _carve_foreign(rows: list[LedgerRow], foreign: Sequence[OwnedPart]) -> list[LedgerRow]:
    """Move the storages outside every segment from the rows that contain them to a separate row.

    Memory of this process's other allocators is outside its segments; memory imported by CUDA IPC belongs to
    another process. Managed and host-mapped memory is in no figure of the device. So what fits in neither row
    is left out of the sum, and mentioned in a detail.
    """
    total = sum(part.size for part in foreign)
    if not total:
        return rows
    reduced: list[LedgerRow] = []
    missing = total
    for row in rows:
        taken = min(row.bytes, missing) if row.row in (OUTSIDE, OTHERS) else 0
        missing -= taken
        reduced.append(msgspec.structs.replace(row, bytes=row.bytes - taken))
    remark = (
        f"{in_words(missing)} more is in no figure of the device (managed or host memory)"
        if missing
        else None
    )
    named = biggest((f"{part.label} ({part.owner})", part.size) for part in foreign)
    origin = "storages outside every segment: another library's, CUDA IPC, managed"
    return [row_of(FOREIGN, total - missing, origin, named, remark), *reduced]
