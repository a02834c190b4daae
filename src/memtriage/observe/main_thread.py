"""Having the program's main thread call a function, wherever it is, between two instructions of its code.

That is the one instant at which a program can be looked at from within without a race: the main thread is not
in the middle of anything but Python code, and does not go on until the function returns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_Native: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class MainThreadCall(Generic[T]):
    """One call, which the interpreter makes as soon as the main thread runs Python code.

    The call must not print and must not raise: it interrupts the program at any place. What interrupts the
    call itself (Ctrl-C) is raised again in the program.

    Args:
        function: what to call.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._claim = threading.Lock()  # whoever has it first: the call, or who no longer wants it
        self._done = threading.Event()
        self._result: T | None = None
        self._interrupted_by: type[BaseException] | None = None
        self._native = _Native(self._run)

    def result(self, within_s: float, done_within_s: float | None = None) -> tuple[bool, T | None]:
        """Waits for the main thread. Not to be called in the main thread.

        Args:
            within_s: how long the main thread may take to come to the call; the call itself may take longer.
            done_within_s: how long the call itself may take from then on; None for as long as it takes.

        Returns:
            Whether the call was made, and what it returned; None when it is not done in time.
        """
        _waiting.add(self)
        if ctypes.pythonapi.Py_AddPendingCall(self._native, None) != 0:  # the interpreter's queue is full
            _waiting.discard(self)
            return False, None
        if not self._done.wait(within_s) and self._claim.acquire(blocking=False):
            return False, None
        if not self._done.wait(done_within_s):
            return True, None
        if self._interrupted_by is not None:
            _raise_in_main_thread(self._interrupted_by)
        return True, self._result

    def _run(self, _: object) -> int:
        _waiting.discard(self)
        if self._claim.acquire(blocking=False):
            try:
                self._result = self._function()
            except BaseException as error:  # no exception gets out of a callback from C
                self._interrupted_by = type(error)
            finally:
                self._done.set()
        return 0


def _raise_in_main_thread(kind: type[BaseException]) -> None:
    """Has the main thread raise an exception at its next instruction."""
    main = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(kind))


_waiting: Final[set[object]] = set()
"""Calls that the interpreter still has in its queue: what it will call must be there by then."""
