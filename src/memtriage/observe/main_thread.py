"""Make the program's main thread call a function, wherever it is, between two instructions of its code.

Only at such an instant can a program be inspected from within without a race: the main thread is in the
middle of Python code only, and does not continue until the function returns.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, TypeVar

from memtriage.process.stdlib import threading, time
from memtriage.process.untraced import untraced

T = TypeVar("T")


class MainThreadCall(Generic[T]):
    """One call, which the interpreter makes as soon as the main thread runs Python code.

    The call must not print, because it may interrupt the program anywhere. What it raises, or what interrupts
    it (Ctrl-C), is raised in the program there. The program's tracer and profiler do not see it.

    Args:
        function: what to call.
        then: what to call after that, with the program's tracer and profiler on. Read at that time.
    """

    def __init__(self, function: Callable[[], T], then: Iterable[Callable[[], object]] = ()) -> None:
        self._function = function
        self._claim = threading.Lock()  # taken by the call or by `cancel`, whichever comes first
        self._running = threading.Lock()  # C code: signal handlers run between instructions of Python
        self._running.acquire()
        self._result: T | None = None
        run = untraced(self._run, then)
        self._pending = _Pending([run])
        self._unfinished = weakref.ref(run)

    @property
    def queued(self) -> bool:
        """Whether the interpreter still has to make it, or is making it, even if it was canceled."""
        return _queue == [self] and self._unfinished() is not None

    def ask(self) -> bool:
        """Ask for the call without waiting for it.

        Returns:
            False if another call is queued, or the interpreter's queue is full. Only one call at a time: if
            traced Python code begins in a call while another one is queued, CPython 3.11 hangs.
        """
        with _asking:
            if any(call.queued for call in _queue):
                return False
            _queue[:] = [self]
            # Not a callback of ctypes, which cannot raise: `PyObject_IsTrue` has the signature of a pending
            # call, and what `__bool__` raises gets into the program. Its result 0, False, means success.
            if ctypes.pythonapi.Py_AddPendingCall(_IS_TRUE, ctypes.c_void_p(id(self._pending))) != 0:
                _queue.clear()
                return False
            return True

    def cancel(self) -> bool:
        """Cancel the call; return whether it will not be made. False once it has begun."""
        return self._claim.acquire(blocking=False)

    def result(self, within_s: float, done_within_s: float | None = None) -> tuple[bool, T | None]:
        """Ask for the call and wait for the main thread. Do not call this in the main thread.

        Args:
            within_s: how long the main thread may take to get to the call; the call itself may take longer.
            done_within_s: how long the call itself may take from then on; None for any time.

        Returns:
            Whether the call was made, and what it returned; None if it is not done in time, or raised.
        """
        give_up_s = time.monotonic() + within_s
        while not self.ask():
            if not _queue or time.monotonic() > give_up_s:
                return False, None
            time.sleep(_TURN_S)
        if self._running.acquire(timeout=within_s):
            return True, self._result
        if self.cancel():
            return False, None
        done = self._running.acquire(timeout=-1 if done_within_s is None else done_within_s)
        return True, self._result if done else None

    def _run(self) -> None:
        if self._claim.acquire(blocking=False):
            try:
                self._result = self._function()
            finally:
                self._running.release()


class _Pending(list[Callable[[], bool]]):
    """What the interpreter calls: an object whose truth value it reads, without Python code.

    It holds the call until it is made. Then only the interpreter holds it, until the call ends.
    """

    __bool__ = property(list.pop)


_IS_TRUE: Final = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)
_TURN_S: Final = 0.002
"""How often to check whether another call is over."""
_asking: Final = threading.Lock()
_queue: Final[list[MainThreadCall[Any]]] = []
"""The call in the interpreter's queue, or the last one. What it will call must stay alive until then."""
