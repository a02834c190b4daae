"""A recording as JSON, schema 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, BinaryIO, Final

import msgspec

from memtriage.model.recording import DeviceRecording, PinnedSegment, Recording

SCHEMA: Final = 1
_MOST: Final = 100
"""Sites and pinned segments listed; the biggest come first."""


def write_stream(recording: Recording, stream: BinaryIO) -> None:
    """Write a recording as one line of JSON to a binary stream such as `sys.stdout.buffer`."""
    stream.write(msgspec.json.encode(as_json(recording)))
    stream.write(b"\n")
    stream.flush()


def as_json(recording: Recording) -> dict[str, Any]:
    """The recording's figures and findings. Those outside `peak` are of the moment of the snapshot."""
    return {
        "schema": SCHEMA,
        "path": recording.path,
        "devices": [_device(device) for device in recording.devices],
        "notes": list(recording.notes),
    }


def _device(one: DeviceRecording) -> dict[str, Any]:
    return {
        "device": one.device,
        "allocated": one.end.allocated,
        "reserved": one.end.reserved,
        "requested": one.end.requested,
        "rounding": one.end.rounding,
        "releasable": one.end.releasable,
        "stranded": one.end.stranded,
        "awaiting_free": one.end.awaiting,
        "private_pools": one.end.private_pools,
        "peak": {
            "allocated": one.peak.allocated,
            "reserved": one.peak.reserved,
            "stranded": one.peak.stranded,
            "time_us": one.peak.time_us,
            "owners": list(one.peak.owners),
        },
        "owners": list(one.owners),
        "sites": list(one.sites[:_MOST]),
        "stranded_by": [
            {"stream": stream, "pool": list(pool), "stranded": total}
            for (stream, pool), total in stranded_by(one.pinned)
        ],
        "pinned": [_pinned(segment) for segment in one.pinned[:_MOST]],
        "segments": len(one.segments),
        "events": len(one.events),
        "steps": {"count": one.steps.count, "source": one.steps.source},
        "exact_from_us": one.exact_from_us,
        "notes": list(one.notes),
        "findings": list(one.findings),
    }


def stranded_by(pinned: Iterable[PinnedSegment]) -> list[tuple[tuple[int, tuple[int, int]], int]]:
    """Stranded bytes by stream and pool, most first."""
    totals: Counter[tuple[int, tuple[int, int]]] = Counter()
    for segment in pinned:
        totals[segment.segment.stream, segment.segment.pool] += segment.stranded
    return totals.most_common()


def _pinned(one: PinnedSegment) -> dict[str, Any]:
    return {
        "address": one.segment.address,
        "size": one.segment.size,
        "stream": one.segment.stream,
        "pool": list(one.segment.pool),
        "stranded": one.stranded,
        "pins": [
            {"address": pin.address, "size": pin.size, "site": pin.site, "owner": owner}
            for pin, owner in list(zip(one.pins, one.owners, strict=True))[:_MOST]
        ],
    }
