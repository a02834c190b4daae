"""The watch's own work, kept apart from the program's signal handlers, exceptions and modules.

A Python signal handler runs between any two instructions of the main thread, and what it raises there (a
timeout, mostly) would be caught as a failure of the watch, or leave a census half done. So the handlers that
the program installs wait until the watch's work is done and run then, in the program's own code.

`PyThreadState_SetAsyncExc` cannot be held off. What it raises is recognized and raised again.
"""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Final

from memtriage.observe.origin import CodeOrigin, package_folder
from memtriage.session.own_modules import OwnModules


class _MainThreadWork:
    """What the main thread is at: how deep in the watch's own work, and which handlers wait for its end."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: list[HeldHandler] = []
        self.modules: OwnModules | None = None


_work: Final = _MainThreadWork()


def begin_program(folder: str | None) -> None:
    """Call before the program runs.

    Args:
        folder: where its imports are looked for first; None where that is not known.
    """
    _work.modules = None if folder is None else OwnModules(folder)
    if _work.modules is not None:
        _work.modules.begin_program()


class HeldHandler:
    """A signal handler of the program that waits while the watch is at work.

    Attributes:
        handler: the program's.
    """

    __slots__ = ("_signum", "handler")

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self._signum = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if _work.depth:
            self._signum = signum
            if self not in _work.waiting:
                _work.waiting.append(self)
        else:
            self.handler(signum, frame)

    def run(self, frame: FrameType | None) -> None:
        """Call it now, unless the program has installed another meanwhile."""
        installed = programs_own(signal.getsignal(self._signum))
        if installed is self.handler:
            self.handler(self._signum, frame)


class OwnWork:
    """`with OwnWork():` holds the program's signal handlers back; they run at the end of the outermost one.

    Only in the main thread, in which handlers run.

    Args:
        last: the program has ended, as far as its handlers are concerned: those that waited are not run.
    """

    __slots__ = ("_last", "_main")

    def __init__(self, *, last: bool = False) -> None:
        self._last = last
        self._main = False

    def __enter__(self) -> None:
        self._main = threading.get_ident() == threading.main_thread().ident
        if self._main:
            _work.depth += 1
            if _work.depth == 1 and _work.modules is not None:
                _work.modules.begin_work()

    def __exit__(self, *exception: object) -> None:
        if self._main:
            if self._last:
                _work.waiting.clear()
            if _work.depth == 1 and _work.modules is not None:
                _work.modules.end_work()
            _work.depth -= 1
            if not _work.depth and _work.waiting:
                _run_waiting(programs_frame(sys._getframe(1)))


def _run_waiting(frame: FrameType | None) -> None:
    held = _work.waiting.pop(0)
    try:
        held.run(frame)
    finally:  # one that raises does not lose the others
        if _work.waiting:
            _run_waiting(frame)


def own_work_under_way() -> bool:
    """Whether the main thread is in the watch's own work."""
    return _work.depth > 0


def programs_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not memtriage's, from a frame on."""
    own = package_folder()
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return frame


def held(handler: Any) -> Any:
    """Return what to install for a handler of the program. SIG_DFL and the like are not held."""
    return HeldHandler(handler) if callable(handler) and type(handler) is not HeldHandler else handler


def programs_own(handler: Any) -> Any:
    """Return the program's handler of what is installed."""
    return handler.handler if type(handler) is HeldHandler else handler


def is_programs_exception(error: BaseException) -> bool:
    """Whether an exception came into the watch's work from outside, not from what the work does.

    So it is if a signal handler raised it that could not be held, or if no instruction raised it that could
    have: `PyThreadState_SetAsyncExc` raises between two instructions. What the program's own code raises
    because the watch has called it, by mistake, is a failure of the watch.
    """
    origin = CodeOrigin()
    handlers = _codes_of_handlers()
    last: TracebackType | None = None
    within_program = False
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code in handlers:
            return True
        within_program = within_program or origin.is_user_file(code.co_filename)
        last, trace = trace, trace.tb_next
    if last is None or within_program or _raises(last, type(error)):
        return False
    return not error.args or _is_users_class(type(error), origin)


def _codes_of_handlers() -> set[CodeType]:
    """What runs when one of the installed signal handlers is called, as far as it is Python."""
    codes = set()
    for signum in signal.valid_signals():
        handler: Any = programs_own(signal.getsignal(signum))
        function = getattr(handler, "__func__", handler)
        if not isinstance(function, FunctionType):
            function = vars(type(handler)).get("__call__")
        if isinstance(function, FunctionType):
            codes.add(function.__code__)
    return codes


def _is_users_class(kind: type, origin: CodeOrigin) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or origin.is_user_file(file)


_RAISED_IN_C: Final = (StopIteration, MemoryError, RecursionError, AssertionError)
"""Exceptions without a text that the interpreter itself raises."""


def _raises(trace: TracebackType, kind: type[BaseException]) -> bool:
    """Whether the instruction at which a traceback ends raises by itself."""
    operation = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return issubclass(kind, _RAISED_IN_C) or dis.opname[operation] in ("RAISE_VARARGS", "RERAISE")
