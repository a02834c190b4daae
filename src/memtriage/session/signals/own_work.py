"""The watch's own work, kept apart from the program's signal handlers, exceptions and modules.

A Python signal handler runs between any two instructions of the main thread. What it raises there (usually a
timeout) would be caught as a failure of the watch, or leave a census half done. So the program's handlers
wait until the watch's work is done, and then run in the program's own code.

`PyThreadState_SetAsyncExc` cannot be delayed. What it raises is recognized and raised again
(`observe.foreign`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from operator import itemgetter
from types import FrameType
from typing import Any, ClassVar, Final, TypeVar

from memtriage.observe.foreign import WrappedHandler, programs_own
from memtriage.observe.main_thread import MainThreadCall
from memtriage.observe.origin import package_folder
from memtriage.process.replaced import leave_out_caller
from memtriage.process.stdlib import threading
from memtriage.process.untraced import call_untraced
from memtriage.session.signals.own_modules import OwnModules

T = TypeVar("T")

_MAIN_THREAD: Final = threading.main_thread().ident
"""Known before, because asking for it calls Python code that is not memtriage's: a handler that runs there
would get its frame for the program's."""


class _MainThreadWork:
    """How deep the main thread is in the watch's own work, and which handlers wait for its end."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: list[tuple[HeldHandler, int]] = []
        self.modules: OwnModules | None = None


_work: Final = _MainThreadWork()


def begin_program(folder: str | None) -> None:
    """Call before the program runs.

    Args:
        folder: where its imports are looked up first; None if unknown.
    """
    _work.modules = None if folder is None else OwnModules(folder)
    if _work.modules is not None:
        _work.modules.begin_program()


class HeldHandler(WrappedHandler):
    """A signal handler of the program that waits while the watch is working.

    A handler may also run in the watch's functions between two pieces of work: it gets the program's frame
    there, too.
    """

    __slots__ = ()
    after_program: ClassVar = False
    """Whether it runs although the program ended while it waited."""

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if _work.depth:
            if (self, signum) not in _work.waiting:
                _work.waiting.append((self, signum))
            return
        try:
            self.handler(signum, programs_frame(frame))
        except BaseException as error:
            leave_out_caller(error)
            raise

    def run(self, signum: int, frame: FrameType | None) -> None:
        """Call the handler now, unless the program has installed another one meanwhile."""
        if programs_own(signal.getsignal(signum)) is self.handler:
            self.handler(signum, frame)


def a_signal_waits() -> bool:
    """Return whether a handler waits for the end of the watch's work."""
    return bool(_work.waiting)


def do_own_work(work: Callable[[], T], *, last: bool = False) -> T:
    """Call `work` and hold the program's signal handlers back; they run at the end of the outermost call.

    Only the main thread holds handlers back, because only there they run. In every thread the program's
    tracer and profiler are off meanwhile (`process.untraced`).

    Args:
        work: the watch's own work.
        last: the program has ended: its handlers that waited are not run.
    """
    results: list[T] = []

    def kept() -> None:
        with _HandlersHeld(last):
            results.append(work())

    call_untraced(kept, _handlers_that_waited())
    return results[0]


def own_work_in_main_thread(work: Callable[[], T]) -> MainThreadCall[T | None]:
    """Return a call that has the main thread do own work, between two instructions of the program.

    If that thread is in the watch's own work already, `work` is not called and the result is None.
    """

    def held_back() -> T | None:
        if _work.depth:
            return None
        with _HandlersHeld(last=False):
            return work()

    return MainThreadCall(held_back, _handlers_that_waited())


class _HandlersHeld:
    """A context manager: its block is the watch's own work in the main thread."""

    __slots__ = ("_last", "_main")

    def __init__(self, last: bool) -> None:
        self._last = last
        self._main = threading.get_ident() == _MAIN_THREAD

    def __enter__(self) -> None:
        if self._main:
            _work.depth += 1
            if _work.depth == 1 and _work.modules is not None:
                _work.modules.begin_work()

    def __exit__(self, *exception: object) -> None:
        if self._main:
            if self._last:
                _work.waiting[:] = [waits for waits in _work.waiting if waits[0].after_program]
            if _work.depth == 1 and _work.modules is not None:
                _work.modules.end_work()
            _work.depth -= 1


def _handlers_that_waited() -> Iterator[Callable[[], object]]:
    """Iterate over what runs them. If none waits by then, nothing is called, so no tracer sees a call."""
    return map(itemgetter(0), zip((_run_handlers,), _work.waiting, strict=False))


def _run_handlers() -> None:
    if not _work.depth and threading.get_ident() == _MAIN_THREAD:
        _run_waiting(programs_frame(sys._getframe(1)))


def _run_waiting(frame: FrameType | None) -> None:
    held, signum = _work.waiting.pop(0)
    try:
        held.run(signum, frame)
    finally:  # if one raises, the others still run
        if _work.waiting:
            _run_waiting(frame)


def programs_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not memtriage's, beginning with this one."""
    own = package_folder()
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return frame


def held(handler: Any) -> Any:
    """Return what to install for a handler of the program. SIG_DFL and the like are not wrapped."""
    return HeldHandler(handler) if callable(handler) and type(handler) is not HeldHandler else handler
