"""Memory that only one stream can reuse: what a side stream's cache keeps from all others. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.account.segments import free_in
from memtriage.model.blocks import DEFAULT_POOL
from memtriage.model.findings import Finding
from memtriage.model.recording import ALLOC
from memtriage.model.units import MIB, count, size
from memtriage.playbook.snapshots import ADVICE
from memtriage.snapshots.view import DeviceView, known_site


@dataclass(frozen=True, slots=True)
class StreamPolicy:
    """Thresholds for reporting what a stream keeps.

    Attributes:
        floor_bytes: free bytes of a stream below which nothing is reported.
        share: part of the reserved bytes that they must be.
        idle: part of the trace, at its end, in which an unused stream has allocated nothing.
    """

    floor_bytes: int = 64 * MIB
    share: float = 0.1
    idle: float = 0.25


POLICY: Final = StreamPolicy()


def stream_findings(view: DeviceView, policy: StreamPolicy = POLICY) -> list[Finding]:
    """Find side streams that keep free memory: the allocator gives it to no other stream."""
    streams = {segment.stream for segment in view.segments if segment.pool == DEFAULT_POOL}
    if len(streams) < 2:
        return []
    allocs = np.flatnonzero(view.trace.kind == ALLOC)
    recent = allocs[allocs >= len(view.trace) * (1 - policy.idle)]
    main = _main_stream(view, recent if len(recent) else allocs)
    active = set(np.unique(view.trace.stream[recent]).tolist())
    reserved, free = _by_stream(view)
    floor = max(policy.floor_bytes, policy.share * view.end.reserved)
    return [
        _finding(view, stream, reserved[stream], total, idle=len(recent) > 0 and stream not in active)
        for stream, total in free.most_common()
        if stream != main and total >= floor
    ]


def _main_stream(view: DeviceView, allocs: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Return the stream that allocates most; without events the one that has most in use."""
    used: Counter[int] = Counter()
    if len(allocs):
        streams, where = np.unique(view.trace.stream[allocs], return_inverse=True)
        totals = np.bincount(where.reshape(-1), weights=view.trace.size[allocs])
        used.update(dict(zip(streams.tolist(), totals.tolist(), strict=True)))
    else:
        for segment in view.segments:
            used[segment.stream] += sum(block.size for block in segment.blocks if block.state != "free")
    return used.most_common(1)[0][0]


def _by_stream(view: DeviceView) -> tuple[Counter[int], Counter[int]]:
    """Return reserved and free bytes of each stream in the default pool."""
    reserved: Counter[int] = Counter()
    free: Counter[int] = Counter()
    for segment in view.segments:
        if segment.pool == DEFAULT_POOL:
            reserved[segment.stream] += segment.size
            free[segment.stream] += free_in(segment)
    return reserved, free


def _finding(view: DeviceView, stream: int, reserved: int, total: int, *, idle: bool) -> Finding:
    of_stream = view.replayed.stream == stream
    rows = view.by_site(of_stream)
    advice = ADVICE["unused stream" if idle else "side stream"]
    evidence = [f"{size(total)} of the {size(reserved)} reserved for stream {stream:#x} is free"]
    if idle:
        evidence.append("the stream allocated nothing in the last quarter of the recording")
    if rows:
        allocations = count(int((view.replayed.born[of_stream] >= 0).sum()), "allocation")
        evidence.append(f"{allocations} recorded on this stream, most bytes at {rows[0][0]}")
    return Finding(
        kind="stream_pool",
        device=view.device,
        bytes=total,
        allocated_at=known_site(rows[0][0]) if rows else None,
        mechanism=advice.why,
        fix=advice.fix,
        playbook=advice.entry,
        evidence=evidence,
    )
