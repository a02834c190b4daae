"""Threads of the watch, which a program that waits for all of its threads does not see."""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from memtriage.process.stdlib import os, threading

_OF_FAULTS: Final = {signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""Signals that an instruction of the thread itself causes; blocked, they would kill without a word."""


class OwnThread:
    """A thread below `threading`: not in `threading.enumerate()`, not waited for at the end of the process.

    Code that runs in it must not call `threading.current_thread()`, which would enter it in that list.
    The kernel's list of threads (`/proc/self/task`) has it, and so has `sys._current_frames()`. It takes no
    signal: one for the process that all threads of the program block has to wait for its `sigwait`.

    Args:
        target: what runs in it. What it raises is lost: the program's `sys.unraisablehook` is not to see it.
    """

    def __init__(self, target: Callable[[], object]) -> None:
        self._target = target
        self._ended = _thread.allocate_lock()
        self._ident: int | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Start it.

        Raises:
            RuntimeError: no thread can be had.
        """
        self._ended.acquire()
        callers = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OF_FAULTS)
        try:
            self._ident = _thread.start_new_thread(self._run, ())  # it has its creator's mask
        except BaseException:
            self._ended.release()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, callers)

    @property
    def is_alive(self) -> bool:
        """Whether it runs; False in a forked child, which has no other thread than the one that forked."""
        return self._ended.locked() and os.getpid() == self._pid

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return self.is_alive and self._ident == _thread.get_ident()

    def join(self, timeout: float = -1) -> bool:
        """Wait until it has ended and return whether it has.

        Args:
            timeout: the most seconds to wait; for ever by default.
        """
        if not self.is_alive:
            return True
        if self.is_current or not self._ended.acquire(timeout=timeout):
            return False
        self._ended.release()
        return True

    def _run(self) -> None:
        self._ident = _thread.get_ident()
        try:
            with suppress(Exception):
                self._target()
        finally:
            _forget(self._ident)
            self._ended.release()


def _forget(ident: int) -> None:
    """Take the entry out that a library's `threading.current_thread()` may have made."""
    with suppress(AttributeError, KeyError):
        if isinstance(threading._active[ident], threading._DummyThread):  # type: ignore[attr-defined]
            del threading._active[ident]  # type: ignore[attr-defined]
