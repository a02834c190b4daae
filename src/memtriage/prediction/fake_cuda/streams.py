"""Streams and events as `torch.cuda` shows them, for the time of a trace.

The allocator keeps the free blocks of each stream apart, so what matters is which stream is current when
something is allocated, and which blocks another stream uses (`Tensor.record_stream`). Work itself is done at
once. When a stream has passed its work is unknown in a trace: it counts as done as soon as another stream or
the host waits for it, and at the latest when the phase of training changes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from memtriage.prediction.fake_cuda.tensors import gpu
from memtriage.prediction.lifetimes import DEFAULT_STREAM, Lifetimes

_MODULE: Final = {"__module__": "torch.cuda"}
"""Where programs find these classes, and pickle does."""


class Stream:
    """`torch.cuda.Stream`."""

    streams: Streams

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = self.cuda_stream = self.streams.number()
        self._left: list[Stream] = []

    @property
    def device(self) -> torch.device:
        return gpu()

    @property
    def device_index(self) -> int:
        index: int = gpu().index
        return index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> Stream:
        self._left.append(self.streams.current)
        self.streams.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.streams.set(self._left.pop())

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        made = event or self.streams.event_type()
        made.record(self)
        return made

    def synchronize(self) -> None:
        self.streams.passed(self)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.streams.passed(stream)


class Event:
    """`torch.cuda.Event`."""

    cuda_event = 0
    streams: Streams

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded: Stream | None = None

    @property
    def device(self) -> torch.device:
        return gpu()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 1.0

    def record(self, stream: Any = None) -> None:
        self._recorded = stream or self.streams.current

    def wait(self, stream: Any = None) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        if self._recorded is not None:
            self.streams.passed(self._recorded)


class Streams:
    """The streams of one trace.

    Attributes:
        stream_type, event_type: what stands for `torch.cuda.Stream` and `torch.cuda.Event`.
        default, current: streams.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._next = DEFAULT_STREAM
        self.stream_type: type[Stream] = type("Stream", (Stream,), {"streams": self, **_MODULE})
        self.event_type: type[Event] = type("Event", (Event,), {"streams": self, **_MODULE})
        self.default = self.current = self.stream_type()

    def number(self) -> int:
        """A number for another stream."""
        self._next += 1
        return self._next - 1

    def set(self, stream: Stream) -> None:
        """What is allocated from now on is this stream's."""
        self.current = stream
        self._lifetimes.stream = stream.stream_id

    def entered(self, stream: Stream | None) -> AbstractContextManager[Any]:
        """`with torch.cuda.stream(stream):`"""
        return nullcontext() if stream is None else stream

    def passed(self, stream: Stream) -> None:
        """Something waits for a stream."""
        self._lifetimes.stream_passed(stream.stream_id)

    def synchronize(self, *args: Any) -> None:
        """`torch.cuda.synchronize`."""
        for number in range(self._next):
            self._lifetimes.stream_passed(number)
