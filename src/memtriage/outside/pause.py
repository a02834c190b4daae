"""Stop another process for a moment, so that its memory can be copied at one instant."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from memtriage.outside.memory import ForbiddenError, GoneError, RemoteMemory

PAUSE_S: Final = 0.05
"""The longest that a process is stopped, unless more was asked for."""
_COPIES: Final = 0.6
"""Part of a stop in which copying goes on: on busy processors, what follows takes time too."""
_GUARD: Final = 0.9
"""Part of a stop after which the guard ends it: it may be woken a little late."""
PART: Final = 32
"""Chunks between two looks at the clock: 8 MiB."""
_START: Final = b"s"
_END: Final = b"e"
_TIME: Final = struct.Struct("d")


class Stop:
    """A process that is stopped.

    Args:
        limit_s: the longest that it is.

    Attributes:
        seconds: how long it was stopped at most, once it goes on again.
    """

    def __init__(self, limit_s: float = PAUSE_S) -> None:
        self.seconds = 0.0
        self._limit_s = limit_s
        self._began = time.monotonic()

    def begin(self) -> None:
        """Let the time begin."""
        self._began = time.monotonic()

    def end(self, at: float | None = None) -> None:
        """Note that the process goes on, since now or since a time; what came first counts."""
        seconds = (time.monotonic() if at is None else at) - self._began
        self.seconds = min(seconds, self.seconds or seconds)

    def copy(self, memory: RemoteMemory, chunks: Sequence[int]) -> int:
        """Read chunks until they are all copied or the time is over; return how many are."""
        for first in range(0, len(chunks), PART):
            if time.monotonic() - self._began > _COPIES * self._limit_s:
                return first
            memory.read_ahead(chunks[first : first + PART])
        return len(chunks)


@contextlib.contextmanager
def paused(
    pid: int, prepare: Callable[[], object] = lambda: None, limit_s: float = PAUSE_S
) -> Iterator[Stop]:
    """Stop a process in the block, for at most `limit_s`.

    A child of this process sends the signal to go on when the time is over: also if this one is killed, or
    hangs. A process that is stopped already is left as it is.

    Args:
        pid: the process.
        prepare: called when the child is there, just before the process is stopped. Memory that is made ready
            earlier is shared with the child, and has to be copied when it is written to.
        limit_s: seconds.

    Raises:
        GoneError: there is no such process.
        ForbiddenError: it may not be stopped.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        raise GoneError(f"process {pid} ended") from None
    try:
        if _is_stopped(pid):
            prepare()
            yield Stop(limit_s)
            return
        guard, stop = _StopGuard(handle, limit_s), Stop(limit_s)
        try:
            prepare()
            guard.start()
            stop.begin()
            _send(handle, signal.SIGSTOP, pid)
            yield stop
        finally:
            try:
                _send(handle, signal.SIGCONT, pid)
            finally:
                stop.end()
                stop.end(guard.end())
    finally:
        os.close(handle)


class _StopGuard:
    """The child that lets a process go on when the time is over."""

    def __init__(self, handle: int, limit_s: float) -> None:
        orders, self._orders = os.pipe()
        self._told, told = os.pipe()
        self._child = os.fork()
        if self._child:
            os.close(orders)
            os.close(told)
            return
        try:
            os.close(self._orders)
            os.close(self._told)
            with contextlib.suppress(OSError):  # where it is allowed, busy processors do not delay the guard
                os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            if os.read(orders, 1) == _START:
                late = not select.select([orders], [], [], _GUARD * limit_s)[0]
                if late or os.read(orders, 1) != _END:  # or this process was killed
                    signal.pidfd_send_signal(handle, signal.SIGCONT)
                    os.write(told, _TIME.pack(time.monotonic()))
        finally:
            os._exit(0)

    def start(self) -> None:
        """Let the time begin."""
        os.write(self._orders, _START)

    def end(self) -> float | None:
        """End the child; return when it let the process go on, None where it did not have to."""
        with contextlib.suppress(BrokenPipeError):  # its time was over
            os.write(self._orders, _END)
        told = os.read(self._told, _TIME.size)
        os.waitpid(self._child, 0)
        os.close(self._orders)
        os.close(self._told)
        return float(_TIME.unpack(told)[0]) if told else None


def _send(handle: int, number: signal.Signals, pid: int) -> None:
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        raise GoneError(f"process {pid} ended while it was read") from None
    except PermissionError:
        raise ForbiddenError(f"process {pid} may not be stopped") from None


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        raise GoneError(f"process {pid} ended") from None
