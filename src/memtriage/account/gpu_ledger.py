"""The closed GPU ledger: every byte in use on a device in exactly one row.

    device used = this process's segments + what it has outside them + other processes + nobody visible
    segments    = requested + rounding + awaiting stream events + releasable + stranded

Pure: no torch, no driver. Sizes are bytes. Known limitations: the allocator, the storages and the driver are
read one after the other, so what moves in between ends up in the row `unexplained`; a storage that is alive
in a block already freed (a dangling pointer handed in from outside) is counted by the block's state.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from memtriage.model.blocks import DEFAULT_POOL, Block, DriverUse, Segment
from memtriage.model.census import StorageRecord
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.units import size as in_words
from memtriage.observe.holders.pytorch import CUBLAS_WORKSPACES

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

NAMED_PARTS: Final = 3
"""How many of the biggest parts of a row its detail names."""


class WorkspaceSizes(msgspec.Struct, frozen=True):
    """Sizes of the workspaces that torch keeps for cuBLAS and cuBLASLt, in bytes."""

    cublas: frozenset[int]
    cublaslt: frozenset[int]


def workspace_sizes(config: str | None = None, lt_config: str | None = None) -> WorkspaceSizes:
    """The sizes that torch's cuBLAS workspaces can have.

    Source: `parseChosenWorkspaceSize` and `parseCUDABlasLtWorkspaceSize` in CublasHandlePool.cpp: pairs
    `:SIZE:COUNT` in KiB; by default 32 MiB on Hopper (in newer sources Blackwell too) and `:4096:2:16:8` =
    8,519,680 elsewhere; cuBLASLt, where it does not share the former, 1 MiB.

    Args:
        config: value of `CUBLAS_WORKSPACE_CONFIG`, if set.
        lt_config: value of `CUBLASLT_WORKSPACE_SIZE` (KiB), if set.
    """
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    chosen = {sum(int(size) * int(count) for size, count in pairs) << 10} if pairs else {32 << 20, 8_519_680}
    lt_kib = int(lt_config) if lt_config and lt_config.isdecimal() else 1024
    return WorkspaceSizes(cublas=frozenset(chosen - {0}), cublaslt=frozenset({lt_kib << 10} - {0}))


DEFAULT_WORKSPACES: Final = workspace_sizes()

HANDLES_PER_STREAM: Final = 2
"""A workspace belongs to a (cuBLAS handle, stream), a handle to a thread: forward's and backward's."""


class SegmentTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of segments is made of, in bytes.

    `reserved` = `requested` + `rounding` + `awaiting` + `releasable` + `stranded`; `private_pools` is the
    part of `reserved` outside the default pool.
    """

    reserved: int
    requested: int
    rounding: int
    awaiting: int
    releasable: int
    stranded: int
    private_pools: int

    @property
    def allocated(self) -> int:
        """Bytes of live blocks."""
        return self.requested + self.rounding


class StrandedSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment whose free bytes cannot go back to the driver, and what keeps them.

    Attributes:
        segment: the segment.
        stranded: its free bytes that cannot be released.
        pins: its blocks that are in use, biggest first.
    """

    segment: Segment
    stranded: int
    pins: tuple[Block, ...]


def segment_totals(segments: Iterable[Segment]) -> SegmentTotals:
    """Split segments into what their bytes are doing; see `SegmentTotals`."""
    sums: Counter[str] = Counter()
    for segment in segments:
        releasable = releasable_in(segment)
        sums["reserved"] += segment.size
        sums["releasable"] += releasable
        sums["private"] += segment.size if segment.pool != DEFAULT_POOL else 0
        sums["free"] += _free_in(segment)
        for block in segment.blocks:
            sums["requested"] += block.requested if block.state == "active" else 0
            sums["rounding"] += block.size - block.requested if block.state == "active" else 0
            sums["awaiting"] += block.size if block.state == "awaiting" else 0
    return SegmentTotals(
        reserved=sums["reserved"],
        requested=sums["requested"],
        rounding=sums["rounding"],
        awaiting=sums["awaiting"],
        releasable=sums["releasable"],
        stranded=sums["free"] - sums["releasable"],
        private_pools=sums["private"],
    )


def releasable_in(segment: Segment) -> int:
    """Free bytes that `empty_cache()` gives back: a wholly free segment, or wholly free pages.

    A segment of a private pool counts too, though the allocator keeps it for as long as its pool lives. For
    expandable segments the page size is taken as the default for the pool (a snapshot does not tell it).
    """
    if all(block.state == "free" for block in segment.blocks):
        return _free_in(segment)
    if segment.page is None:
        return 0
    return sum(_whole_pages(block, segment) for block in segment.blocks if block.state == "free")


def whole_pages(block: Block, segment: Segment) -> tuple[int, int]:
    """Start and end of the pages that lie wholly inside a block; pages count from the segment's first byte.

    As `ExpandableSegment::unmap` does it: a mapped range begins at a page, and a partly used page stays. Both
    are the block's start where there is no such page, or the segment is not expandable.
    """
    if segment.page is None:
        return block.address, block.address
    first = -(-(block.address - segment.address) // segment.page)
    last = (block.end - segment.address) // segment.page
    if last <= first:
        return block.address, block.address
    return segment.address + first * segment.page, segment.address + last * segment.page


def stranded_segments(segments: Iterable[Segment]) -> list[StrandedSegment]:
    """The segments with stranded bytes, the worst first."""
    found = [
        StrandedSegment(segment=segment, stranded=stranded, pins=_pins(segment))
        for segment in segments
        if (stranded := _free_in(segment) - releasable_in(segment)) > 0
    ]
    return sorted(found, key=lambda one: (-one.stranded, one.segment.address))


def outside_allocator(use: DriverUse, reserved: int) -> int:
    """Bytes in use that this process's allocator did not reserve: the figure to take a baseline of.

    Where the driver tells this process's use: its context, kernels and libraries. Where it does not, they
    cannot be told from other processes, and all of it is returned. Never negative.
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
    """The ledger of one device; its rows sum to `use.used`.

    Args:
        device: `cuda:N`.
        segments: the allocator's segments (those of other devices are left out); None for an allocator that
            keeps none (`cudaMallocAsync`): then storages are `requested` and the rest is outside.
        storages: live storages (those of other devices are left out). Where two overlap, the bytes belong to
            the one that begins first. None where nobody looked for them: then `requested` has no owner.
        use: the driver's figures.
        context_baseline: `outside_allocator` when the device was first seen; what it has grown by since is a
            row of its own.
        workspaces: sizes by which a cuBLAS workspace is recognised.
    """
    index = int(device.partition(":")[2] or 0)
    mine = sorted((s for s in segments or () if s.device == index), key=lambda s: s.address)
    claims = _disjoint_claims(one for one in storages or () if one.device == device)
    beyond = _outside_segments(claims, mine)
    if segments is None:
        inside = _owner_rows(beyond)
        outside = _outside_rows(use, sum(part.size for part in beyond), context_baseline)
    else:
        inside = _allocator_rows(mine, None if storages is None else claims, workspaces)
        outside = _outside_rows(use, sum(segment.size for segment in mine), context_baseline)
        outside = _carve_foreign(outside, beyond)
    rows = [row for row in inside + outside if row.bytes]
    difference = use.used - sum(row.bytes for row in rows)
    if difference:
        detail = "the allocator and the driver were read at different instants, or disagree"
        rows.append(LedgerRow(row=UNEXPLAINED, bytes=difference, detail=detail))
    return Ledger(device=device, total=use.used, source=use.source, rows=rows)


# --- storages to blocks -------------------------------------------------------------------------------------


class _Claim(msgspec.Struct, frozen=True):
    """Bytes [start, end) that one storage has to itself."""

    start: int
    end: int
    storage: StorageRecord


class _Part(msgspec.Struct, frozen=True):
    """Bytes of one pool that have one owner, with the words that name them."""

    pool: tuple[int, int]
    owner: str | None
    label: str
    size: int


def _disjoint_claims(storages: Iterable[StorageRecord]) -> list[_Claim]:
    """Storages as ranges that do not overlap, in order of address."""
    alive = [one for one in storages if one.nbytes > 0 and one.address > 0]
    claims: list[_Claim] = []
    taken = 0
    for one in sorted(alive, key=lambda one: (one.address, -one.nbytes)):
        start, end = max(one.address, taken), one.address + one.nbytes
        if start < end:
            claims.append(_Claim(start, end, one))
            taken = end
    return claims


def _overlaps(claims: Sequence[_Claim], start: int, end: int) -> Iterator[tuple[_Claim, int]]:
    """The claims that reach into [start, end), each with the bytes it has there."""
    position = max(0, bisect_right(claims, start, key=lambda claim: claim.start) - 1)
    while position < len(claims) and claims[position].start < end:
        claim = claims[position]
        shared = min(end, claim.end) - max(start, claim.start)
        if shared > 0:
            yield claim, shared
        position += 1


def _outside_segments(claims: Sequence[_Claim], segments: Sequence[Segment]) -> list[_Part]:
    """What the storages have outside every segment."""
    inside: Counter[int] = Counter()
    for segment in segments:
        for claim, shared in _overlaps(claims, segment.address, segment.end):
            inside[claim.start] += shared
    left = ((claim, claim.end - claim.start - inside[claim.start]) for claim in claims)
    return [
        _Part(DEFAULT_POOL, claim.storage.owner, _holder(claim.storage), size)
        for claim, size in left
        if size > 0
    ]


def _holder(storage: StorageRecord) -> str:
    return storage.named or "holder unknown"


# --- rows of the segments -----------------------------------------------------------------------------------


def _allocator_rows(
    segments: Sequence[Segment], claims: Sequence[_Claim] | None, workspaces: WorkspaceSizes
) -> list[LedgerRow]:
    """Rows of the segments' bytes; without claims nothing can be said of who holds a block."""
    labels: dict[int, str] = {}
    parts: list[_Part] = []
    unclaimed: list[tuple[Segment, Block, int]] = []
    for segment in segments:
        for block in segment.blocks:
            if block.state != "active":
                continue
            left = block.requested
            for claim, shared in _overlaps(claims or (), block.address, block.address + block.requested):
                owner, holder = claim.storage.owner, _holder(claim.storage)
                parts.append(_Part(segment.pool, owner, holder, shared))
                labels.setdefault(block.address, f"{holder} ({owner})")
                left -= shared
            if left:
                unclaimed.append((segment, block, left))
    whole = [(segment, block) for segment, block, left in unclaimed if left == block.requested]
    recognised = frozenset[int]() if claims is None else _cublas_blocks(whole, workspaces)
    owner_unknown = None if claims is None else CPP_ONLY
    for segment, block, left in unclaimed:
        if block.address in recognised:
            part = _workspace_part(segment, block)
            labels[block.address] = f"{CUBLAS} ({CUBLAS_WORKSPACES})"
        else:
            part = _unclaimed_part(segment, block, left, owner_unknown)
            labels.setdefault(block.address, part.label)
        parts.append(part)
    return _owner_rows(parts) + _state_rows(segments, labels)


def _workspace_part(segment: Segment, block: Block) -> _Part:
    reason = (
        f"{CUBLAS_WORKSPACES}: recognised by size ({block.requested:,} bytes) and stream "
        f"({segment.stream:#x}, at most {HANDLES_PER_STREAM} of this size), held by no storage that was found"
    )
    return _Part(segment.pool, CUBLAS, reason, block.requested)


def _unclaimed_part(segment: Segment, block: Block, left: int, owner: str | None) -> _Part:
    if left < block.requested:
        return _Part(segment.pool, owner, "rest of a block of which a storage covers a part", left)
    label = f"allocated at {block.site}" if block.site else "allocation site not recorded"
    return _Part(segment.pool, owner, label, left)


def _cublas_blocks(blocks: Sequence[tuple[Segment, Block]], sizes: WorkspaceSizes) -> frozenset[int]:
    """Addresses of the blocks, of those that no storage claims, that fit a cuBLAS workspace.

    More of one size on one stream than there are handles means that some of them are something else; as
    nothing tells which, none is taken. The small cuBLASLt size is common, so it needs a cuBLAS workspace on
    the same stream beside it.
    """
    groups: defaultdict[tuple[tuple[int, int], int, int], list[int]] = defaultdict(list)
    for segment, block in blocks:
        if block.requested in sizes.cublas or block.requested in sizes.cublaslt:
            groups[segment.pool, segment.stream, block.requested].append(block.address)
    fitting = {key: found for key, found in groups.items() if len(found) <= HANDLES_PER_STREAM}
    used_by_cublas = {(pool, stream) for pool, stream, size in fitting if size in sizes.cublas}
    return frozenset(
        address
        for (pool, stream, size), addresses in fitting.items()
        if size in sizes.cublas or (pool, stream) in used_by_cublas
        for address in addresses
    )


def _owner_rows(parts: Iterable[_Part]) -> list[LedgerRow]:
    """One `requested` row for each owner, the default pool apart from the private ones; biggest first."""
    groups: defaultdict[tuple[str | None, bool], list[_Part]] = defaultdict(list)
    for part in parts:
        groups[part.owner, part.pool != DEFAULT_POOL].append(part)
    rows = [
        LedgerRow(
            row=REQUESTED,
            bytes=sum(part.size for part in group),
            owner=owner,
            detail=_join(_pools(group), _biggest((part.label, part.size) for part in group)),
        )
        for (owner, _private), group in groups.items()
    ]
    # What has no name comes last, whatever its size: the named rows are what a reader looks for.
    return sorted(rows, key=lambda row: (row.owner in (CPP_ONLY, None), -row.bytes))


def _state_rows(segments: Sequence[Segment], labels: dict[int, str]) -> list[LedgerRow]:
    """Rounding, awaiting, releasable and stranded, each for the default pool and for the private ones."""
    private = [segment for segment in segments if segment.pool != DEFAULT_POOL]
    default = [segment for segment in segments if segment.pool == DEFAULT_POOL]
    rows: list[LedgerRow] = []
    for group, pools in ((default, None), (private, _pool_list(private))):
        totals = segment_totals(group)
        kept = "a pool keeps its emptied segments for as long as it lives" if pools else None
        pages = _page_remark(group)
        rows += [
            _row(ROUNDING, totals.rounding, pools, "block sizes above what was asked for"),
            _row(
                AWAITING,
                totals.awaiting,
                pools,
                "freed, but a stream that used it is not yet past that point",
            ),
            _row(RELEASABLE, totals.releasable, pools, kept or "empty_cache() gives it back", pages),
            _row(STRANDED, totals.stranded, pools, _worst_pinned(group, labels), pages),
        ]
    order = (ROUNDING, AWAITING, RELEASABLE, STRANDED)
    return sorted(rows, key=lambda row: order.index(row.row))


def _worst_pinned(segments: Sequence[Segment], labels: dict[int, str]) -> str | None:
    found = stranded_segments(segments)
    worst = [
        f"{in_words(one.stranded)} free in a segment of {in_words(one.segment.size)} pinned by "
        f"{_count(len(one.pins), 'block')} of {in_words(sum(pin.size for pin in one.pins))}, "
        f"the biggest {_pin(one.pins[0], labels)}"
        for one in found[:NAMED_PARTS]
    ]
    return _join(_count(len(found), "segment"), *worst)


def _pin(block: Block, labels: dict[int, str]) -> str:
    if block.state == "awaiting":
        return "awaiting a stream"
    return labels.get(block.address, "of unknown holder")


def _page_remark(segments: Sequence[Segment]) -> str | None:
    pages = sorted({segment.page for segment in segments if segment.page is not None})
    if not pages:
        return None
    return f"expandable segments: estimated in pages of {' and '.join(in_words(page) for page in pages)}"


def _free_in(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks if block.state == "free")


def _pins(segment: Segment) -> tuple[Block, ...]:
    used = (block for block in segment.blocks if block.state != "free")
    return tuple(sorted(used, key=lambda block: (-block.size, block.address)))


def _whole_pages(block: Block, segment: Segment) -> int:
    start, end = whole_pages(block, segment)
    return end - start


# --- rows outside the segments ------------------------------------------------------------------------------


def _own(use: DriverUse, reserved: int) -> int | None:
    """The driver's figure for this process, unless it is less than the allocator holds.

    Then the process id was another's: ids of a container and of its host can coincide.
    """
    return use.own if use.own is not None and use.own >= reserved else None


def _outside_rows(use: DriverUse, reserved: int, baseline: int | None) -> list[LedgerRow]:
    outside = outside_allocator(use, reserved)
    own = _own(use, reserved)
    shared = None if own is not None else "other processes included: the driver does not tell this one's use"
    at_first = min(baseline or 0, outside)
    since = "grown since the device was first seen: kernels, libraries, NCCL"
    rows = [
        _row(CONTEXT, at_first, "CUDA context, kernels and libraries when the device was first seen", shared),
        _row(
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
    listed = _biggest((f"pid {pid}", size) for pid, size in use.processes if size is not None)
    untold = [pid for pid, size in use.processes if size is None]
    if untold:
        remark = f"of {_count(len(untold), 'process', 'processes')} the driver does not tell the size"
        return [_row(OTHERS, known + rest, listed, remark, "memory of no visible process is included")]
    return [
        _row(OTHERS, known, listed),
        _row(NOBODY, rest, "the driver itself, a process of another container, or one that ended badly"),
    ]


def _carve_foreign(rows: list[LedgerRow], foreign: Sequence[_Part]) -> list[LedgerRow]:
    """Give the storages outside every segment a row, out of the rows that must contain them.

    Memory of this process's other allocators is outside its segments; memory imported by CUDA IPC belongs to
    another process. Managed and host-mapped memory is in no figure of the device, so what fits in neither row
    is left out of the sum and told in words.
    """
    total = sum(part.size for part in foreign)
    if not total:
        return rows
    kept: list[LedgerRow] = []
    missing = total
    for row in rows:
        taken = min(row.bytes, missing) if row.row in (OUTSIDE, OTHERS) else 0
        missing -= taken
        kept.append(msgspec.structs.replace(row, bytes=row.bytes - taken))
    remark = (
        f"{in_words(missing)} more is in no figure of the device (managed or host memory)"
        if missing
        else None
    )
    biggest = _biggest((f"{part.label} ({part.owner})", part.size) for part in foreign)
    origin = "storages outside every segment: another library's, CUDA IPC, managed"
    return [_row(FOREIGN, total - missing, origin, biggest, remark), *kept]


# --- words --------------------------------------------------------------------------------------------------


def _row(name: str, size: int, *details: str | None) -> LedgerRow:
    return LedgerRow(row=name, bytes=size, detail=_join(*details))


def _join(*parts: str | None) -> str | None:
    return "; ".join(part for part in parts if part) or None


def _pools(parts: Iterable[_Part]) -> str | None:
    sums: Counter[str] = Counter()
    for part in parts:
        if part.pool != DEFAULT_POOL:
            sums[f"{part.pool[0]}.{part.pool[1]}"] += part.size
    return f"private pools: {_biggest(sums.items())}" if sums else None


def _pool_list(segments: Iterable[Segment]) -> str | None:
    sums: Counter[str] = Counter()
    for segment in segments:
        sums[f"{segment.pool[0]}.{segment.pool[1]}"] += segment.size
    return f"private pools by reserved bytes: {_biggest(sums.items())}" if sums else None


def _biggest(parts: Iterable[tuple[str, int]]) -> str | None:
    """The biggest parts with their sizes, equal names put together, and how many more there are."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, size in parts:
        sums[name] += size
        counts[name] += 1
    named = sorted(sums.items(), key=lambda one: (-one[1], one[0]))
    words = [
        f"{name} {in_words(size)}" + (f" in {counts[name]}" if counts[name] > 1 else "")
        for name, size in named[:NAMED_PARTS]
    ]
    if len(named) > NAMED_PARTS:
        words.append(
            f"{len(named) - NAMED_PARTS} more {in_words(sum(size for _, size in named[NAMED_PARTS:]))}"
        )
    return ", ".join(words) or None


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
