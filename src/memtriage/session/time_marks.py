"""Marks over time: when they are due, and how the main thread is made to make them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from memtriage.observe import cuda
from memtriage.observe.alone import backward_runs, imports_torch
from memtriage.observe.foreign import is_programs_exception
from memtriage.observe.main_thread import MainThreadCall
from memtriage.observe.repeated_calls import RepeatedCalls
from memtriage.session.progress import TrainingProgress
from memtriage.session.remote.answer import Lock
from memtriage.session.signals.own_work import own_work_in_main_thread, programs_frame


@dataclass(frozen=True, slots=True)
class TimeMarkPolicy:
    """When marks are made over time.

    Attributes:
        apart_s: before any step or backward, the least time from the start to the first mark and between two
            marks. A program that works for 1 s after its imports should have two dozen, as many as the levels
            of a rate. At 0.3 ms each they take less than 1 %.
        share: later, the distance of two marks is this share of the time since the first: 220 marks in the
            first 10 s, 810 in an hour. So growth is seen on every time scale.
        loading: until the first mark, the main thread is asked after this share of the time since the start.
            Each request takes the interpreter from a program that imports: 110 times in 10 s, not 330.
        quiet_s: once the program trains, a mark is made after this long without any (evaluation, saving), for
            the record. Growth is then judged by steps and backwards.
    """

    apart_s: float = 0.03
    share: float = 0.01
    loading: float = 0.03
    quiet_s: float = 5.0


POLICY: Final = TimeMarkPolicy()


@dataclass(slots=True)
class TimeMarks:
    """Asks the program's main thread for a mark whenever one is due, and never waits for it.

    In the main thread a census sees the program's functions between two instructions, with their variables.
    If that thread is outside Python, the mark is made when it returns.

    Args:
        progress: where training stands.
        since_mark: gives the seconds since the last mark of any kind.
        mark: makes the mark.
        lock: what the watch holds while it makes a mark, and takes before a backward.
        failed: notes that a part of the watch failed, by its name.
    """

    progress: TrainingProgress
    since_mark: Callable[[], float]
    mark: Callable[[], None]
    lock: Lock
    failed: Callable[[str, BaseException], None]
    _asked: MainThreadCall[None] | None = None
    _calls: RepeatedCalls = field(default_factory=RepeatedCalls)
    _first_s: float | None = None
    _made_s: float = 0.0
    _stopped: bool = False

    def at_wake(self) -> float:
        """Ask for a mark if one is due; return the seconds until the next check.

        Until the program's work was seen to repeat, its stacks are read as often as marks are made at first.
        """
        if not self.progress.works:
            self.progress.repeats = self._calls.seen()
        remaining = self._remaining_s()
        if remaining > 0:
            return remaining if self.progress.works else min(remaining, POLICY.apart_s)
        # One request is enough: while the main thread is elsewhere, more would only fill the queue.
        if not self._stopped and (self._asked is None or not self._asked.queued):
            self._asked = own_work_in_main_thread(self._come)
            self._asked.ask()
        loading = 0.0 if self._first_s is not None else POLICY.loading * self.progress.elapsed()
        return max(POLICY.apart_s, loading)

    def stop(self) -> None:
        """Make no further mark, not even the one that was asked for."""
        self._stopped = True
        if self._asked is not None:
            self._asked.cancel()

    def _remaining_s(self) -> float:
        if self.progress.trains:
            return POLICY.quiet_s - self.since_mark()
        now = self.progress.elapsed()
        followed = 0.0 if self._first_s is None else now - self._first_s
        return self._made_s + max(POLICY.apart_s, POLICY.share * followed) - now

    def _come(self) -> None:
        """Make a mark if this is a suitable instant: in the main thread, in the middle of the program."""
        if self._stopped:
            return
        try:
            self._make()
        except (Exception, SystemExit) as error:  # an audit hook of the program may raise either
            if is_programs_exception(error):
                raise
            self.failed("time mark", error)

    def _make(self) -> None:
        if self.lock._is_owned() or not self.lock.acquire(blocking=False):
            return  # another thread makes a mark
        try:
            # Training may have begun since the request; then a step or a backward makes the mark.
            if self._remaining_s() <= 0 and not self._busy():
                self.mark()
                self._made_s = self.progress.elapsed()
                self._first_s = self._made_s if self._first_s is None else self._first_s
        finally:
            self.lock.release()

    def _busy(self) -> bool:
        """Whether the program is doing something that a mark, or its census, must not disturb."""
        # A thread that announced a backward may be on its way into the engine, where it is not visible yet.
        in_backward = self.progress.position.phase == "backward" or backward_runs()
        return in_backward or cuda.capturing() or imports_torch() or _importing()


def _importing() -> bool:
    """Whether the program is importing: that is not growth of a loop.

    Inside the import system, a census would also meet locks that the program holds.
    """
    frame = programs_frame(sys._getframe())
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
