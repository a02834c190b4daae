"""Marks made over time: when they are due, and having the main thread make them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from memtriage.observe import cuda
from memtriage.observe.alone import backward_runs
from memtriage.observe.foreign import is_programs_exception
from memtriage.observe.main_thread import MainThreadCall
from memtriage.session.progress import TrainingProgress
from memtriage.session.remote.answer import Lock
from memtriage.session.signals.own_work import own_work_in_main_thread, programs_frame


@dataclass(frozen=True, slots=True)
class TimeMarkPolicy:
    """When marks are made over time.

    Attributes:
        apart_s: while there was neither a step nor a backward, the least time between two marks, and from the
            start to the first: a program that works for 1 s after its imports is to have two dozen, as many
            as levels that a rate is taken from. At 0.3 ms each they take less than 1 %.
        share: from some time on, they are this share of the time since the first apart: 220 marks in the
            first 10 s, 810 in an hour, and growth is seen on every time scale.
        quiet_s: once the program trains, a mark is made after so long without any (evaluation, saving), for
            the record. Steps and backwards are what growth is judged by then.
    """

    apart_s: float = 0.03
    share: float = 0.01
    quiet_s: float = 5.0


POLICY: Final = TimeMarkPolicy()


class TimeMarks:
    """Asks the program's main thread for a mark whenever one is due, and never waits for it.

    There a census sees the program's functions between two instructions, with their variables. A main thread
    that sits outside of Python makes the mark when it comes back; until then there is none.

    Args:
        progress: where training stands.
        since_mark: gives the seconds since the last mark of any kind.
        mark: makes the mark.
        lock: what the watch holds while it makes a mark, and takes before a backward.
        failed: notes that a part of the watch failed, by its name.
    """

    def __init__(
        self,
        progress: TrainingProgress,
        *,
        since_mark: Callable[[], float],
        mark: Callable[[], None],
        lock: Lock,
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._progress = progress
        self._since_mark = since_mark
        self._mark = mark
        self._lock = lock
        self._failed = failed
        self._asked: MainThreadCall[None] | None = None
        self._first_s: float | None = None
        self._made_s = 0.0
        self._stopped = False

    def at_wake(self) -> float:
        """Ask for a mark if one is due; return in how many seconds that should be looked at again."""
        remaining = self._remaining_s()
        if remaining > 0:
            return remaining
        # One in the queue is enough: while the main thread is elsewhere, more would only fill it.
        if not self._stopped and (self._asked is None or not self._asked.queued):
            self._asked = own_work_in_main_thread(self._come)
            self._asked.ask()
        return POLICY.apart_s

    def stop(self) -> None:
        """Make no further mark, also not the one that was asked for."""
        self._stopped = True
        if self._asked is not None:
            self._asked.cancel()

    def _remaining_s(self) -> float:
        if self._progress.trains:
            return POLICY.quiet_s - self._since_mark()
        now = self._progress.elapsed()
        followed = 0.0 if self._first_s is None else now - self._first_s
        return self._made_s + max(POLICY.apart_s, POLICY.share * followed) - now

    def _come(self) -> None:
        """Make a mark if this is an instant for one. In the main thread, in the middle of the program."""
        if self._stopped:
            return
        try:
            self._make()
        except (Exception, SystemExit) as error:  # an audit hook of the program may raise either
            if is_programs_exception(error):
                raise
            self._failed("time mark", error)

    def _make(self) -> None:
        if self._lock._is_owned() or not self._lock.acquire(blocking=False):
            return  # another thread makes a mark
        try:
            # Training may have begun since this was asked for; then a step or a backward makes the mark.
            if self._remaining_s() <= 0 and not self._busy():
                self._mark()
                self._made_s = self._progress.elapsed()
                self._first_s = self._made_s if self._first_s is None else self._first_s
        finally:
            self._lock.release()

    def _busy(self) -> bool:
        """Whether the program is in the middle of what a mark, or a census at it, must stay away from."""
        # A thread that has said so may be on its way into the engine, where nobody sees it yet.
        in_backward = self._progress.position.phase == "backward" or backward_runs()
        return in_backward or cuda.capturing() or _importing()


def _importing() -> bool:
    """Whether torch is only half there, or the program imports: what that loads is no growth of a loop.

    Inside the import system a census would also meet locks that the program holds.
    """
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        return True
    frame = programs_frame(sys._getframe())
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
