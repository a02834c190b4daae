"""Runs the program as a child of this process, which ends all that the program has started."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from memtriage.prediction.sandbox import syscalls

BY_SIGNAL: Final = 128
"""As in a shell, a status above this is the number of a signal: the first process of a namespace cannot end
by one."""


def supervise(meanwhile: Callable[[], object] | None = None) -> None:
    """Fork, and return in the child. This process waits for it, ends what it has left, and then ends itself.

    Daemons are ended too: an orphan becomes a child of this process (Linux only). SIGTERM ends all at once.

    Args:
        meanwhile: runs in a thread of this process.
    """
    if sys.platform != "linux":
        return
    syscalls.adopt_orphans()
    program = os.fork()
    if program == 0:
        syscalls.die_with_parent(signal.SIGKILL)
        os.setsid()  # a program may end its group
        return

    def stop(*_: object) -> None:
        with suppress(ProcessLookupError):  # it may just have ended
            os.kill(program, signal.SIGKILL)

    status = 1
    try:
        signal.signal(signal.SIGTERM, stop)
        if meanwhile is not None:
            threading.Thread(target=meanwhile, daemon=True).start()
        status = _end_of(program)
        _end_children()
    finally:
        os._exit(status)


def _end_of(program: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else BY_SIGNAL - code


def _end_children() -> None:
    """End all descendants: the children of one that ends become children of this process."""
    with suppress(ChildProcessError):  # there is none, or none any more
        os.waitpid(-1, os.WNOHANG)
        import psutil

        while True:
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            os.waitpid(-1, 0)
