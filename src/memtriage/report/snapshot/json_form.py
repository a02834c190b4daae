"""A recording as JSON, schema 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from memtriage.model.recording import DeviceRecording, PinnedSegment, Recording
from memtriage.model.snapshot_result import (
    SnapshotDevice,
    SnapshotPeak,
    SnapshotPin,
    SnapshotResult,
    SnapshotSegment,
    SnapshotSteps,
    StrandedShare,
)

_MOST: Final = 100
"""Sites and pinned segments listed; the biggest come first."""


def as_json(recording: Recording) -> SnapshotResult:
    """Return the recording's figures and findings. Those outside `peak` are of the moment of the snapshot."""
    return SnapshotResult(
        path=recording.path,
        devices=[_device(device) for device in recording.devices],
        notes=list(recording.notes),
    )


def _device(device: DeviceRecording) -> SnapshotDevice:
    figures = asdict(device.end)
    awaiting = figures.pop("awaiting")
    return SnapshotDevice(
        device=device.device,
        **figures,
        awaiting_free=awaiting,
        peak=SnapshotPeak(
            allocated=device.peak.allocated,
            reserved=device.peak.reserved,
            stranded=device.peak.stranded,
            time_us=device.peak.time_us,
            owners=list(device.peak.owners),
        ),
        owners=list(device.owners),
        sites=list(device.sites[:_MOST]),
        stranded_by=[
            StrandedShare(stream, pool, total) for (stream, pool), total in stranded_by(device.pinned)
        ],
        pinned=[_pinned(segment) for segment in device.pinned[:_MOST]],
        segments=len(device.segments),
        events=len(device.events),
        steps=SnapshotSteps(device.steps.count, device.steps.source),
        exact_from_us=device.exact_from_us,
        notes=list(device.notes),
        verdict=device.verdict,
        findings=list(device.findings),
        labels=list(device.labels[:_MOST]),
    )


def stranded_by(pinned: Iterable[PinnedSegment]) -> list[tuple[tuple[int, tuple[int, int]], int]]:
    """Stranded bytes by stream and pool, most first."""
    totals: Counter[tuple[int, tuple[int, int]]] = Counter()
    for segment in pinned:
        totals[segment.segment.stream, segment.segment.pool] += segment.stranded
    return totals.most_common()


def _pinned(pinned: PinnedSegment) -> SnapshotSegment:
    return SnapshotSegment(
        address=pinned.segment.address,
        size=pinned.segment.size,
        stream=pinned.segment.stream,
        pool=pinned.segment.pool,
        stranded=pinned.stranded,
        pins=[
            SnapshotPin(pin.address, pin.size, pin.site, owner)
            for pin, owner in list(zip(pinned.pins, pinned.owners, strict=True))[:_MOST]
        ],
    )
