"""A recording as a trace for Perfetto (https://ui.perfetto.dev), in the Trace Event Format (JSON).

One process a device. Counters: what is allocated, reserved and stranded, and each owner's bytes. Slices: the
training steps and the spans that `record_function` named. Instants: the peak and out-of-memory errors. The
biggest blocks are asynchronous slices, from their allocation to their end. Times count from the first event.

The format is described in https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. It
has no word for what began before the trace: such a block begins with the first event.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from memtriage.model.recording import NO_FRAMES, OWNERS, Annotation, DeviceRecording, Recording
from memtriage.model.units import size
from memtriage.report.html.downsample import extremes, instants
from memtriage.report.snapshot.words import where

COUNTED_INSTANTS: Final = 20_000
"""Instants of a device at which counters are written at most: each is about 300 bytes of JSON."""
BLOCKS: Final = 4000
"""Blocks of a device that become slices: those that held most for longest."""

_STEPS: Final = 1
_PEAKS: Final = 2
_SPANS: Final = 3
"""Thread ids, which Perfetto shows as tracks."""


def write_trace(recording: Recording, path: Path) -> None:
    """Write the trace of a recording; compressed, which Perfetto reads too, when the name ends in `.gz`.

    Raises:
        OSError: the file cannot be written.
    """
    with _open(path) as stream:
        stream.write('{"displayTimeUnit":"ms","otherData":')
        stream.write(_line({"source": Path(recording.path).name}))
        stream.write(',"traceEvents":[\n')
        stream.write(",\n".join(_line(event) for event in _events(recording)))
        stream.write("\n]}\n")


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    began = min(
        (int(device.events.time_us[0]) for device in recording.devices if len(device.events)),
        default=min(
            (start for annotation in recording.annotations if (start := annotation.start_us) is not None),
            default=0,
        ),
    )
    for process, device in enumerate(recording.devices, 1):
        yield from _names(process, device)
        yield from _instants(process, device, began, recording)
        yield from _counters(process, device, began)
        yield from _steps(process, device, began)
        yield from _blocks(process, device, began, recording)
        index = device.device.partition(":")[2]
        mine = (
            annotation
            for annotation in recording.annotations
            if annotation.device is None or str(annotation.device) == index
        )
        yield from _spans(process, mine, began)


def _names(process: int, device: DeviceRecording) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": device.device}}
    for thread, name in ((_STEPS, "steps"), (_PEAKS, "peak and errors"), (_SPANS, "annotations")):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _instants(
    process: int, device: DeviceRecording, began: int, recording: Recording
) -> Iterator[dict[str, Any]]:
    common = {"ph": "i", "s": "p", "pid": process, "tid": _PEAKS}
    peak = device.peak
    if peak.event >= 0:
        args = {"allocated": peak.allocated, "reserved": peak.reserved, "stranded": peak.stranded}
        yield {**common, "name": "peak", "ts": peak.time_us - began, "args": args}
    for oom in device.ooms:
        yield {
            **common,
            "name": f"out of memory: {size(oom.requested)}",
            "ts": oom.time_us - began,
            "args": {
                "requested": oom.requested,
                "device_free": oom.device_free,
                "allocated": oom.allocated,
                "reserved": oom.reserved,
                "site": recording.stacks[oom.stack].site if oom.stack >= 0 else NO_FRAMES,
            },
        }


def _counters(process: int, device: DeviceRecording, began: int) -> Iterator[dict[str, Any]]:
    """Yield the values after each chosen event; of events at one time the last counts, as in any trace."""
    course = device.timeline
    columns = {"allocated": course.allocated, "reserved": course.reserved, "stranded": course.stranded}
    owned = {
        f"owner: {OWNERS[owner]}": device.owner_timeline(owner)
        for owner in np.unique(device.lives.owner).tolist()
    }
    rows = np.union1d(instants(tuple(columns.values()), COUNTED_INSTANTS), extremes(owned.values()))
    times = (device.events.time_us[rows] - began).tolist()
    for name, column in {**columns, **owned}.items():
        last = None
        for time, value in zip(times, column[rows].tolist(), strict=True):
            if value != last:
                yield {"ph": "C", "name": name, "pid": process, "ts": time, "args": {"bytes": value}}
            last = value


def _steps(process: int, device: DeviceRecording, began: int) -> Iterator[dict[str, Any]]:
    times = device.events.time_us
    start = 0
    for number, end in enumerate(device.steps.ends, 1):
        from_us, to_us = int(times[start]), int(times[min(end, len(times) - 1)])
        yield _slice(process, _STEPS, f"step {number}", from_us - began, to_us - from_us)
        start = min(end, len(times) - 1)


def _spans(process: int, annotations: Iterable[Annotation], began: int) -> Iterator[dict[str, Any]]:
    for annotation in annotations:
        if annotation.start_us is not None and annotation.end_us is not None:
            yield _slice(
                process,
                _SPANS,
                annotation.name,
                annotation.start_us - began,
                annotation.end_us - annotation.start_us,
            )


def _slice(process: int, thread: int, name: str, start: int, length: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": start, "dur": max(0, length)}


def _blocks(
    process: int, device: DeviceRecording, began: int, recording: Recording
) -> Iterator[dict[str, Any]]:
    lives, times = device.lives, device.events.time_us
    if not len(times) or not len(lives):
        return
    start = times[np.maximum(lives.born, 0)]
    end = np.where(lives.died >= 0, times[lives.died], times[-1])
    chosen = np.argsort(-(lives.size * (end - start + 1)), kind="stable")[:BLOCKS]
    for number in chosen.tolist():
        site = recording.stacks[lives.stack[number]].site if lives.stack[number] >= 0 else NO_FRAMES
        owner = OWNERS[lives.owner[number]]
        common = {
            "cat": f"blocks: {owner}",
            "name": site,
            "id": f"{process}.{number}",
            "pid": process,
            "tid": 0,
        }
        args = {
            "bytes": int(lives.size[number]),
            "requested": int(lives.requested[number]),
            "address": f"{int(lives.address[number]):#x}",
            "where": where(device.pools[lives.pool[number]], int(lives.stream[number])),
            "owner": owner,
        }
        yield {"ph": "b", **common, "ts": int(start[number]) - began, "args": args}
        yield {"ph": "e", **common, "ts": int(end[number]) - began}
