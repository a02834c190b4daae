"""The course of a recorded device as a chart's columns: owners stacked, what is free above them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memtriage.model.recording import OWNERS, DeviceRecording
from memtriage.report.html.columns import pack
from memtriage.report.html.downsample import extremes, instants
from memtriage.report.snapshot.words import OWNER_LOOKS

_STEP_MARKS: Final = 40
"""Step ends that a chart marks; more would hide it."""
_OOM_MARKS: Final = 8


_CHARACTERS: Final = 3
"""What a packed number takes, about: the first guess at how many rows fit."""
_FEWEST_ROWS: Final = 160
"""Rows of a chart at the least, beside the extremes of every owner: a coarse course."""


def timeline(device: DeviceRecording, characters: int) -> dict[str, Any] | None:
    """Return the columns, marks and the peak's row of a device's chart; None for fewer than two events.

    Args:
        device: what to draw.
        characters: what the packed columns may take, about. Where the recording has more, instants are left
            out, but never the lowest or highest of a stretch.
    """
    events, course = device.events, device.timeline
    if len(events) < 2:
        return None
    owned = {
        name: device.owner_timeline(OWNERS.index(name))
        for name in OWNER_LOOKS
        if np.any(device.lives.owner == OWNERS.index(name))
    }
    stranded = course.stranded
    named = [device.peak.event, *(oom.event for oom in device.ooms[:_OOM_MARKS])]
    special = np.union1d(extremes(owned.values()), np.asarray([row for row in named if row >= 0], np.int64))
    limit = characters // (_CHARACTERS * (len(owned) + 4))
    while True:
        limit = max(limit, _FEWEST_ROWS)
        rows = np.union1d(instants((course.allocated, course.reserved, stranded), limit), special)
        columns = _columns(device, owned, stranded, rows)
        drawn = [*columns["layers"], *columns["lines"]]
        packed = [columns["event"], columns["time_us"], *(column["values"] for column in drawn)]
        size = sum(len(column["base64"]) for column in packed)
        if size <= characters or limit == _FEWEST_ROWS:
            break
        limit = min(limit, len(rows)) * characters // size - 1
    return {
        **columns,
        "marks": _marks(device),
        "left_out": _left_out(len(rows), len(events)),
        "peak_row": int(np.searchsorted(rows, max(device.peak.event, 0))),
    }


def _columns(
    device: DeviceRecording,
    owned: dict[str, NDArray[np.int64]],
    stranded: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> dict[str, Any]:
    events, course = device.events, device.timeline
    lines = (("allocated", "ink", course.allocated), ("reserved", "ink-3", course.reserved))
    return {
        "event": pack(rows),
        "time_us": pack(events.time_us[rows] - events.time_us[0]),
        "layers": [
            {"name": name, "color": shade, "hatched": hatched, "values": pack(layer)}
            for name, shade, hatched, layer in _layers(device, owned, stranded, rows)
        ],
        "lines": [{"name": name, "color": shade, "values": pack(line[rows])} for name, shade, line in lines],
    }


def _left_out(shown: int, recorded: int) -> str | None:
    if shown == recorded:
        return None
    return (
        f"{shown:,} of {recorded:,} instants are in this page: the highest and the lowest of every stretch."
    )


def _layers(
    device: DeviceRecording,
    owned: dict[str, NDArray[np.int64]],
    stranded: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> list[tuple[str, str, bool, NDArray[np.int64]]]:
    """Return name, color, hatching and values of each layer, the lowest first; their sum is reserved."""
    course = device.timeline
    allocated = course.allocated[rows]
    layers = [(name, OWNER_LOOKS[name].color, False, values[rows]) for name, values in owned.items()]
    attributed = np.sum([values for *_, values in layers], axis=0, dtype=np.int64)
    others = (
        ("not attributed", "hue-other", False, np.maximum(allocated - attributed, 0)),
        ("awaiting a stream", "awaiting", False, course.active[rows] - allocated),
        ("stranded", "stranded", True, stranded[rows]),
        ("private and free", "hue-past", False, course.private_pools_free[rows]),
        ("releasable", "releasable", False, course.releasable[rows]),
    )
    return layers + [layer for layer in others if layer[-1].any()]


def _marks(device: DeviceRecording) -> list[dict[str, Any]]:
    """Return what the chart points out: errors and the peak first, so that their labels find room."""
    events = device.events
    marks = [_mark(device, oom.event, "out of memory", "bad") for oom in device.ooms[:_OOM_MARKS]]
    if device.peak.event >= 0:
        marks.append(_mark(device, device.peak.event, "peak", "ink"))
    if device.exact_from_us is not None:
        exact = int(np.searchsorted(events.time_us, device.exact_from_us))
        if exact < len(events):
            marks.append(_mark(device, exact, "exact from here", "warn"))
    ends = list(enumerate(device.steps.ends, 1))
    every = -(-len(ends) // _STEP_MARKS) if ends else 1
    marks += [
        _mark(device, min(end, len(events) - 1), f"step {number}")
        for number, end in ends
        if number % every == 0
    ]
    return marks


def _mark(device: DeviceRecording, event: int, label: str, shade: str | None = None) -> dict[str, Any]:
    times = device.events.time_us
    at = {"event": event, "time": (int(times[event]) - int(times[0])) / 1e6}
    return {"at": at, "label": label, "strong": shade is not None, "color": shade}
