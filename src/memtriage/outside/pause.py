"""Stopping another process for a moment, so that what is copied of it is of one instant."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Final

from memtriage.outside.memory import ForbiddenError, GoneError, RemoteMemory

PAUSE_S: Final = 0.05
"""The longest that a process is stopped."""
_PART: Final = 64
"""Chunks between two looks at the clock: 16 MiB."""


class Stop:
    """A process that is stopped.

    Attributes:
        seconds: how long it was stopped at most, once it goes on again.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = time.monotonic()

    def copy(self, memory: RemoteMemory, chunks: Sequence[int]) -> bool:
        """Read chunks until they are all copied or the time is over; return whether they all are."""
        for first in range(0, len(chunks), _PART):
            if time.monotonic() - self._began > PAUSE_S * 0.8:
                return False
            memory.read_ahead(chunks[first : first + _PART])
        return True


@contextlib.contextmanager
def paused(pid: int) -> Iterator[Stop]:
    """Stop a process in the block, for at most `PAUSE_S`.

    A child of this process sends the signal to go on when the time is over: also if this one is killed, or
    hangs. A process that is stopped already is left as it is.

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
            yield Stop()
            return
        guard = _guard(handle)
        stop = Stop()
        try:
            _send(handle, signal.SIGSTOP, pid)
            yield stop
        finally:
            _send(handle, signal.SIGCONT, pid)
            stop.seconds = time.monotonic() - stop._began
            os.waitpid(guard, 0)
    finally:
        os.close(handle)


def _guard(handle: int) -> int:
    """Start the child that lets the process go on when the time is over; return its number."""
    child = os.fork()
    if child:
        return child
    try:
        time.sleep(PAUSE_S)
        signal.pidfd_send_signal(handle, signal.SIGCONT)
    finally:
        os._exit(0)


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
