"""Turn the dictionaries of a snapshot into columns, after which they are not needed.

Unknown keys are ignored and missing ones tolerated, at every level. If torch wrote a stack once and then
referred to it, it is loaded as one list or dictionary, so equal stacks are recognized by identity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np

from memtriage.model.code_origin import is_python
from memtriage.model.recording import (
    ALLOC,
    ANNOTATE,
    EVENT_KINDS,
    MAX_FRAMES,
    NO_FRAMES,
    OTHER_EVENT,
    SEGMENT_ALLOC,
    Events,
    SnapshotError,
    Stack,
)
from memtriage.observe.cuda import Frame, allocation_site

_CODES: Final = {name: code for code, name in enumerate(EVENT_KINDS)}
_NODE: Final = re.compile(r"Backward\w*::apply$|AccumulateGrad::apply$")
"""What autograd's nodes are called: `torch::autograd::generated::MmBackward0::apply`."""
_ALLOCATES: Final = re.compile(
    r"torch::(?:unwind|CapturedTraceback|cuda::)|c10::|at::(?:detail::|native::empty|.*empty)|^<?unknown|anonymous"
)
"""Functions of C++ between a request and the allocator, and those that record it."""
_CHUNK: Final = 1 << 16
"""Events converted at a time: bounds the temporary lists."""
_MAX_IDENTITIES: Final = 1 << 16
"""Distinct lists of frames, by identity; a file that shares no frames has one for every event."""


def last_events(trace: Events, most: int) -> Events:
    """The last events of a trace, at most so many."""
    first = max(0, len(trace) - most)

    def last(column: Any) -> Any:
        if isinstance(column, dict):
            return {event - first: said for event, said in column.items() if event >= first}
        return column[first:]

    return Events(**{each.name: last(getattr(trace, each.name)) for each in fields(trace)})


@dataclass(slots=True)
class StackTable:
    """The distinct stacks of a file, numbered as they are met. 0 is the stack without frames."""

    frames: list[tuple[Frame, ...]] = field(default_factory=lambda: [()])
    _by_identity: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})
    _by_content: dict[tuple[tuple[object, object, object], ...], int] = field(default_factory=lambda: {(): 0})

    def number(self, frames: Sequence[Frame]) -> int:
        """The number of a stack. The caller keeps the frames alive while it asks."""
        identity = tuple(map(id, frames))
        number = self._by_identity.get(identity)
        if number is None:
            number = self._number_of_content(frames)
            if len(self._by_identity) < _MAX_IDENTITIES:
                self._by_identity[identity] = number
        return number

    def _number_of_content(self, frames: Sequence[Frame]) -> int:
        content = tuple((frame.get("filename"), frame.get("line"), frame.get("name")) for frame in frames)
        number = self._by_content.setdefault(content, len(self.frames))
        if number == len(self.frames):
            self.frames.append(tuple(frames))
        return number

    def stacks(self) -> tuple[Stack, ...]:
        """All stacks, with the frame to blame."""
        return tuple(_stack(frames) for frames in self.frames)


def trace_columns(trace: list[Mapping[str, Any]], stacks: StackTable) -> Events:
    """The columns of one device's trace.

    Raises:
        SnapshotError: when an entry is no event.
    """
    if not isinstance(trace, list):
        raise SnapshotError(f"a device's trace is a {type(trace).__name__}")
    count = len(trace)
    columns = Events(
        time_us=np.zeros(count, np.int64),
        kind=np.zeros(count, np.uint8),
        address=np.zeros(count, np.int64),
        size=np.zeros(count, np.int64),
        stream=np.zeros(count, np.int64),
        stack=np.zeros(count, np.int32),
    )
    for start in range(0, count, _CHUNK):
        part = trace[start : start + _CHUNK]
        try:
            _fill(columns, start, part, stacks)
        except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            raise SnapshotError(f"events {start} to {start + len(part)} hold no event: {error}") from None
    # two threads may have read the clock in one order and taken the lock in the other
    np.maximum.accumulate(columns.time_us, out=columns.time_us)
    return columns


def _fill(columns: Events, start: int, part: Sequence[Mapping[str, Any]], stacks: StackTable) -> None:
    span = slice(start, start + len(part))
    columns.kind[span] = [_CODES.get(event["action"], OTHER_EVENT) for event in part]
    columns.time_us[span] = [event.get("time_us", 0) for event in part]
    columns.address[span] = [event.get("addr", 0) for event in part]
    columns.size[span] = [event["size"] for event in part]
    columns.stream[span] = [event.get("stream", 0) for event in part]
    columns.stack[span] = _stack_numbers(part, stacks)
    for offset in np.flatnonzero(columns.kind[span] == _CODES["oom"]).tolist():
        free = part[offset].get("device_free")
        if isinstance(free, int):
            columns.device_free[start + offset] = free
    for offset, label in enumerate([event.get("user_metadata") for event in part]):
        if label and columns.kind[start + offset] in (ALLOC, ANNOTATE):
            columns.labels[start + offset] = str(label)
    if "pool_id" in part[0]:
        for offset in np.flatnonzero(np.isin(columns.kind[span], (ALLOC, SEGMENT_ALLOC))).tolist():
            first, second = part[offset].get("pool_id") or (0, 0)
            if first or second:
                columns.pool[start + offset] = (int(first), int(second))


def _stack_numbers(part: Sequence[Mapping[str, Any]], stacks: StackTable) -> list[int]:
    number = stacks.number
    numbers = []
    last: object = None
    current = 0
    for event in part:
        frames = event.get("frames")
        # A free is two events with one list, as is a block that needed a new segment.
        if frames is not last:
            last = frames
            current = number(frames) if frames else 0
        numbers.append(current)
    return numbers


def span_ends(raw: object) -> dict[str, list[int]]:
    """When the spans ended that `record_function` named, in microseconds, by name."""
    ends: dict[str, list[int]] = {}
    for span in raw if isinstance(raw, list) else ():
        if isinstance(span, dict) and span.get("stage") != "START" and isinstance(span.get("time_us"), int):
            ends.setdefault(str(span.get("name", "")), []).append(span["time_us"])
    return ends


def _stack(frames: Sequence[Frame]) -> Stack:
    python = [frame for frame in frames if is_python(str(frame.get("filename", "")))]
    return Stack(
        site=allocation_site(python) or _native_site(frames) or NO_FRAMES,
        frames=tuple(_line(frame) for frame in frames[:MAX_FRAMES]),
    )


def _native_site(frames: Sequence[Frame]) -> str | None:
    """The site of a stack that is all C++ (`stacks="all"`, autograd's thread).

    The node that ran; else the innermost function that is no part of allocating.
    """
    names = [str(frame.get("name", "")).partition("(")[0] for frame in frames]
    node = next((name for name in names if _NODE.search(name)), None)
    node = node or next((name for name in names if name and not _ALLOCATES.search(name)), None)
    return None if node is None else f"C++ in {node.partition('<')[0].rpartition(' ')[2]}"


def _line(frame: Frame) -> str:
    return f"{frame.get('filename', '?')}:{frame.get('line', 0)} in {frame.get('name', '?')}"
