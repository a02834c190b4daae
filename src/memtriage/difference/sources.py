"""Read one side of a comparison: a run's record, a prediction, a plan, or a memory snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from memtriage.model.difference import HeldRow, Side
from memtriage.model.evidence import CensusSeen, DataSeen, HolderSeen
from memtriage.model.ledger import CPU_TENSORS, MALLOC_IN_USE, PYTHON_OBJECTS
from memtriage.model.paths import HolderPath, PathSegment, SegmentKind, in_words
from memtriage.model.plan import Plan
from memtriage.model.prediction import PeakRow, Prediction
from memtriage.model.recording import NO_FRAMES, Recording, SnapshotError
from memtriage.store.locate import RecordError
from memtriage.store.reader import RankRecord, read_run

EXPECTED: Final = (
    "expected a folder of memtriage run, the JSON of memtriage predict or plan, or a PyTorch memory snapshot"
)
_LARGEST_JSON: Final = 1 << 28
"""Bytes of a file that are read as JSON."""


def read(path: Path) -> Side:
    """Read what a file or folder holds at its peak.

    Raises:
        ValueError: it is none of what can be compared, or cannot be read.
    """
    if path.is_dir() or path.name.endswith((".jsonl", ".jsonl.gz")):
        return _of_record(path)
    try:
        with path.open("rb") as file:  # once: it may be a pipe
            data = file.read(1)
            if data == b"{":
                data += file.read(_LARGEST_JSON)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; {EXPECTED}") from error
    return of_json(data, str(path)) if data.startswith(b"{") else _of_snapshot_file(path)


def of_json(data: bytes, name: str) -> Side:
    """Read the JSON of `memtriage predict` or `memtriage plan`.

    Raises:
        ValueError: it is neither.
    """
    try:
        return of_prediction(msgspec.json.decode(data, type=Prediction), name)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        return _of_plan(msgspec.json.decode(data, type=Plan), name)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: no prediction and no plan; {EXPECTED}") from error


def of_prediction(prediction: Prediction, name: str) -> Side:
    """Return the peak of a prediction; one that was made without a table only has owners."""
    table, others = prediction.peak_table, prediction.other_peaks
    context = {} if prediction.context is msgspec.UNSET else prediction.context
    return Side(
        of="prediction",
        name=name,
        instant=_peak_of(prediction.peak_phase),
        total=prediction.peak_allocated,
        rows=_of_owners(prediction.by_owner) if table is msgspec.UNSET else _of_table(table),
        others={}
        if others is msgspec.UNSET
        else {_peak_of(phase): _of_table(rows) for phase, rows in others.items()},
        figures={
            "reserved": prediction.peak_reserved,
            "outside the allocator": prediction.outside_allocator,
        },
        context=context | {f"assumed: {note}": "yes" for note in prediction.notes},
    )


def _of_table(table: Sequence[PeakRow]) -> list[HeldRow]:
    return [
        HeldRow(owner=row.owner, module=row.module, site=row.site, phase=row.phase, bytes=row.bytes)
        for row in table
    ]


def _of_plan(plan: Plan, name: str) -> Side:
    """Return the peak of the program with all steps of a plan."""
    return Side(
        of="prediction",
        name=name,
        instant=_peak_of(plan.after.phase),
        total=plan.after.allocated,
        rows=_of_owners(plan.after.by_owner),
        figures={"reserved": plan.after.reserved, "outside the allocator": plan.outside_allocator},
        context={"budget": str(plan.budget), **{step.action: "planned" for step in plan.steps}},
    )


def _of_owners(owners: dict[str, int]) -> list[HeldRow]:
    return [HeldRow(owner=owner, bytes=nbytes) for owner, nbytes in owners.items()]


def _peak_of(phase: str) -> str:
    return f"the peak of {'the optimizer' if phase == 'optimizer' else phase}"


def _of_snapshot_file(path: Path) -> Side:
    from memtriage.snapshots.read import load_snapshot

    try:
        return of_snapshot(load_snapshot(path))
    except SnapshotError as error:
        raise ValueError(f"{error}; {EXPECTED}") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error


def of_snapshot(recording: Recording) -> Side:
    """Return the peak of a recording: each device at its own."""
    peaks = [device.peak for device in recording.devices]
    return Side(
        of="snapshot",
        name=recording.path,
        instant="the peak",
        total=sum(peak.allocated for peak in peaks),
        rows=[
            HeldRow(owner=row.owner, site=None if row.site == NO_FRAMES else row.site, bytes=row.bytes)
            for peak in peaks
            for row in peak.owners
        ],
        figures={
            "reserved": sum(peak.reserved for peak in peaks),
            "stranded": sum(peak.stranded for peak in peaks),
            "allocated at the end": sum(device.end.allocated for device in recording.devices),
            "reserved at the end": sum(device.end.reserved for device in recording.devices),
        },
        context={
            "devices": ", ".join(device.device for device in recording.devices),
            **{f"allocator setting {name}": str(value) for name, value in recording.settings.items()},
            **{
                f"{finding.kind} at {finding.allocated_at or 'no line'}": "found"
                for finding in recording.findings
            },
        },
    )


# --- the record of a run ------------------------------------------------------------------------------------


def _of_record(path: Path) -> Side:
    try:
        return of_run(read_run([path]).ranks, str(path))
    except RecordError as error:
        raise ValueError(f"{error}; {EXPECTED}") from error


def of_run(ranks: Sequence[RankRecord], name: str) -> Side:
    """Return what the ranks of a run hold at the highest mark of their device, or of the host without one."""
    cuda = any(mark.device.startswith("cuda:") for rank in ranks for mark in rank.marks)
    sides = [_of_device(rank) if cuda else _of_host(rank) for rank in ranks]
    start = ranks[0].start
    figures: Counter[str] = Counter()
    for rank in ranks:
        marks = [mark for mark in rank.marks if mark.device.startswith("cuda:") or not cuda]
        figures["reserved"] += max((mark.reserved or 0 for mark in marks), default=0)
        figures["outside the allocator"] += max((mark.outside or 0 for mark in marks), default=0)
        figures["resident on the host"] += max((mark.host_rss or 0 for mark in rank.marks), default=0)
    return Side(
        of="run",
        name=name,
        instant="the highest mark",
        total=sum(row.bytes for rows in sides for row in rows),
        rows=[row for rows in sides for row in rows],
        figures={name: nbytes for name, nbytes in figures.items() if nbytes},
        context={
            "python": start.python or "",
            "torch": start.torch or "",
            "arguments": " ".join(start.argv or ()),
            "ranks": str(start.world_size),
            "host's limit": str(start.host_limit or ""),
            "steps": str(max(rank.last_step for rank in ranks)),
            **{
                f"{finding.kind} of {finding.holder or finding.device}": "found"
                for rank in ranks
                for finding in rank.findings
            },
        },
    )


def _of_device(rank: RankRecord) -> list[HeldRow]:
    """What a rank's GPUs have allocated: what the last census listed there, and the rest."""
    devices = {mark.device for mark in rank.marks if mark.device.startswith("cuda:")}
    highest = {
        device: max(mark.allocated or 0 for mark in rank.marks if mark.device == device) for device in devices
    }
    if rank.end is not None:
        highest |= {device: nbytes for device, nbytes in rank.end.peak_allocated.items() if nbytes}
    held = [holder for holder in _holders(rank) if holder.device in devices]
    rows = _of_holders(held, rank)
    listed = sum(row.bytes for row in rows)
    return [*rows, *_rest("within a step, or after the last census", highest.values(), listed, rank)]


def _of_host(rank: RankRecord) -> list[HeldRow]:
    """A rank's resident set: its tensors and data by holder, the rest by kind."""
    ledger = rank.ledgers.get("host")
    kinds: Counter[str] = Counter()
    for row in () if ledger is None else ledger.rows:
        kinds[row.row] += row.bytes
    tensors = _of_holders([holder for holder in _holders(rank) if holder.device == "cpu"], rank)
    data = [_of_data(each, rank) for each in _data(rank)]
    # Both are in malloc's memory and in that of Python objects: these have what is left of them.
    known = sum(row.bytes for row in (*tensors, *data)) - kinds.pop(CPU_TENSORS, 0)
    for kind in (MALLOC_IN_USE, PYTHON_OBJECTS):
        part = min(max(0, known), kinds[kind])
        kinds[kind], known = kinds[kind] - part, known - part
    rows = [
        *tensors,
        *data,
        *(HeldRow(owner=kind, rank=rank.start.rank, bytes=n) for kind, n in kinds.items()),
    ]
    rows = [row for row in rows if row.bytes]
    highest = max((mark.host_rss or 0 for mark in rank.marks), default=0)
    since = "before or after the last census"
    return [*rows, *_rest(since, [highest], sum(row.bytes for row in rows), rank)]


def _rest(owner: str, highest: Iterable[int], listed: int, rank: RankRecord) -> list[HeldRow]:
    rest = sum(highest) - listed
    return [HeldRow(owner=owner, rank=rank.start.rank, bytes=rest)] if rest else []


def _of_holders(holders: Sequence[HolderSeen], rank: RankRecord) -> list[HeldRow]:
    """Holders at the last census, and what they got after that at the rates of their leaks."""
    if not holders:
        return []
    rates = {leak.holder: leak.bytes_per_step or 0 for leak in reversed(rank.findings)}
    later = rank.last_step - _censuses(rank)[-1].position.step
    rows = []
    for holder in holders:
        detail = holder.detail
        rows.append(
            HeldRow(
                owner=holder.owner or "unknown",
                module=_within_script(holder.anchor, rank),
                site=None if detail is None else detail.allocated_at or detail.stored_at,
                rank=rank.start.rank,
                bytes=holder.size + rates.get(in_words(holder.anchor), 0) * later,
            )
        )
    return rows


def _of_data(data: DataSeen, rank: RankRecord) -> HeldRow:
    return HeldRow(
        owner=f"entries of a {data.kind}",
        module=_within_script(data.path, rank),
        site=data.allocated_at or data.stored_at,
        rank=rank.start.rank,
        bytes=data.entries * data.entry_bytes,
    )


def _within_script(path: HolderPath, rank: RankRecord) -> str:
    """Return a path in words, without the name of the script: that of the other side may have another."""
    script = PathSegment(SegmentKind.MODULE, Path(rank.start.argv[0]).stem) if rank.start.argv else None
    return in_words(path[1:] if len(path) > 1 and path[0] == script else path)


def _censuses(rank: RankRecord) -> list[CensusSeen]:
    """Those of the main process over its run, up to the last that found the program at work."""
    found = [
        line
        for line in rank.evidence
        if isinstance(line, CensusSeen) and not line.role and not line.within_step
    ]
    while found and not found[-1].between:
        found.pop()
    return found


def _holders(rank: RankRecord) -> Sequence[HolderSeen]:
    """All holders at the last census: each line only has those that have changed."""
    held: dict[int, HolderSeen] = {}
    for census in _censuses(rank):
        held |= {holder.id: holder for holder in census.holders}
        for gone in census.gone:
            held.pop(gone, None)
    return [holder for holder in held.values() if holder.size]


def _data(rank: RankRecord) -> Sequence[DataSeen]:
    seen: dict[int, DataSeen] = {}
    for census in _censuses(rank):
        seen |= {data.id: data for data in census.data}
    return list(seen.values())
