"""The watch's own work, kept apart from the program's signal handlers, exceptions and modules.

A Python signal handler runs between any two instructions of the main thread, and what it raises there (a
timeout, mostly) would be caught as a failure of the watch, or leave a census half done. So the handlers that
the program installs wait until the watch's work is done and run then, in the program's own code.

`PyThreadState_SetAsyncExc` cannot be held off. What it raises is recognized and raised again
(`observe.foreign`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from operator import itemgetter
from types import FrameType
from typing import Any, Final, TypeVar

from memtriage.observe.foreign import WrappedHandler, programs_own
from memtriage.observe.main_thread import MainThreadCall
from memtriage.observe.origin import package_folder
from memtriage.process.stdlib import threading
from memtriage.process.untraced import call_untraced
from memtriage.session.signals.own_modules import OwnModules

T = TypeVar("T")


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


class HeldHandler(WrappedHandler):
    """A signal handler of the program that waits while the watch is at work.

    Between two pieces of work the watch's functions begin and return: the handler gets the program's frame
    there too.
    """

    __slots__ = ("_signum",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        super().__init__(handler)
        self._signum = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if _work.depth:
            self._signum = signum
            if self not in _work.waiting:
                _work.waiting.append(self)
            return
        try:
            self.handler(signum, programs_frame(frame))
        except BaseException as error:
            own = error.__traceback__
            error.__traceback__ = None if own is None else own.tb_next
            del own
            raise  # which adds no entry for this frame again

    def run(self, frame: FrameType | None) -> None:
        """Call it now, unless the program has installed another meanwhile."""
        installed = programs_own(signal.getsignal(self._signum))
        if installed is self.handler:
            self.handler(self._signum, frame)


def do_own_work(work: Callable[[], T], *, last: bool = False) -> T:
    """Call `work` and hold the program's signal handlers back; they run at the end of the outermost call.

    That is in the main thread alone, in which handlers run. In every thread the program's tracer and profiler
    are off meanwhile (`process.untraced`).

    Args:
        work: the watch's own work.
        last: the program has ended, as far as its handlers are concerned: those that waited are not run.
    """
    results: list[T] = []

    def kept() -> None:
        with _HandlersHeld(last):
            results.append(work())

    call_untraced(kept, _handlers_that_waited())
    return results[0]


def own_work_in_main_thread(work: Callable[[], T]) -> MainThreadCall[T | None]:
    """Return a call that has the main thread do own work, between two instructions of the program.

    It returns None, and `work` is not called, where that thread is in the watch's own work already.
    """

    def held_back() -> T | None:
        if _work.depth:
            return None
        with _HandlersHeld(last=False):
            return work()

    return MainThreadCall(held_back, _handlers_that_waited())


class _HandlersHeld:
    """`with _HandlersHeld(last):` the main thread is in the watch's own work."""

    __slots__ = ("_last", "_main")

    def __init__(self, last: bool) -> None:
        self._last = last
        self._main = threading.get_ident() == threading.main_thread().ident

    def __enter__(self) -> None:
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


def _handlers_that_waited() -> Iterator[Callable[[], object]]:
    """Iterate over what runs them: nothing where none waits when this is read, so that no tracer sees it."""
    return map(itemgetter(0), zip((_run_handlers,), _work.waiting, strict=False))


def _run_handlers() -> None:
    if not _work.depth and threading.get_ident() == threading.main_thread().ident:
        _run_waiting(programs_frame(sys._getframe(1)))


def _run_waiting(frame: FrameType | None) -> None:
    held = _work.waiting.pop(0)
    try:
        held.run(frame)
    finally:  # one that raises does not lose the others
        if _work.waiting:
            _run_waiting(frame)


def programs_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not memtriage's, from a frame on."""
    own = package_folder()
    while frame is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return frame


def held(handler: Any) -> Any:
    """Return what to install for a handler of the program. SIG_DFL and the like are not held."""
    return HeldHandler(handler) if callable(handler) and type(handler) is not HeldHandler else handler
