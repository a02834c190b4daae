"""How a watched process answers a request for a census: when it can be inspected, and what it adds."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from memtriage.account.ledgers import take_ledgers
from memtriage.model.asked import Answer
from memtriage.model.units import duration
from memtriage.observe.alone import Alone
from memtriage.observe.foreign import is_programs_exception
from memtriage.process.copies import Copy
from memtriage.process.stdlib import os, threading, time
from memtriage.session.progress import TrainingProgress
from memtriage.session.remote.listen import Deadline
from memtriage.session.remote.take import answer_in_copy, take_answer
from memtriage.session.signals.own_work import own_work_in_main_thread
from memtriage.store.layout import RankIdentity

_TRY_AGAIN_S: Final = 0.002
_MAIN_WITHIN_S: Final = 1.0
"""How long to wait for a main thread that is in code outside Python."""


class Lock(AbstractContextManager[Any], Protocol):
    """A `threading.RLock`."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...
    def release(self) -> None: ...
    def _is_owned(self) -> bool: ...


@dataclass(slots=True)
class Responder:
    """Takes censuses of this process at requests from outside.

    Args:
        identity, argv: of the watched run.
        progress: where training stands, and in which thread.
        lock: what the watch holds while it makes a mark, and takes before a backward.
        running: whether this process is still watched.
        baselines, script_root: as for `memtriage.session.remote.take.take_answer`.
    """

    identity: RankIdentity
    argv: list[str]
    progress: TrainingProgress
    lock: Lock
    running: Callable[[], bool]
    baselines: Mapping[int, int]
    script_root: str | None

    def answer(self, within_s: float, follow: bool = False) -> Answer:
        """Take a census of this process, or say why there is none.

        The main thread makes a copy of the process that takes it, between two instructions of the program
        and not inside a backward. Where no copy can be made, or one failed, it takes the census itself. If
        it does not return to Python code in time, as in a job that hangs, the calling thread takes it.

        Args:
            within_s: how long to wait for such an instant.
            follow: as for `memtriage.session.remote.take.take_answer`.
        """
        deadline, in_copy = Deadline(within_s), True
        while self.running():
            # The requesting process does not wait longer for the census itself (`remote/ask.py`).
            call = own_work_in_main_thread(partial(self._look, deadline, follow, in_copy=in_copy))
            reached, answer = call.result(min(_MAIN_WITHIN_S, deadline.left_s), within_s)
            if not reached:
                with Alone():
                    answer = self._look(deadline, follow, in_copy=False)
            copied = isinstance(answer, _Looking)
            if isinstance(answer, _Looking):
                answer, in_copy = answer.result(within_s), False
            if answer is not None:
                return answer
            if not deadline.left_s:
                return self._counters_only(deadline, late=copied)
            time.sleep(_TRY_AGAIN_S)
        return Answer(pid=os.getpid(), refused="its watch has ended")

    def _look(self, deadline: Deadline, follow: bool, *, in_copy: bool) -> Answer | _Looking | None:
        """Take a census now, or make a copy that does; None if this is not a suitable instant."""
        if self.lock._is_owned() or not self.lock.acquire(blocking=False):
            return None  # in the middle of a mark, which may be taking a census of its own
        try:
            # Another thread that announced a backward may not be visible in the engine yet.
            in_backward = self.progress.position.phase == "backward"
            if in_backward and self.progress.thread != threading.get_ident():
                return None
            started, placed = time.perf_counter(), self._placed(deadline)
            asked = self.baselines, self.script_root, follow
            copy = answer_in_copy(*asked) if in_copy else None
            answer = take_answer(*asked) if copy is None else _Looking(copy, placed)
            placed["paused_s"] = round(time.perf_counter() - started, 6)
            return replace(answer, **placed) if isinstance(answer, Answer) else answer
        except Exception as error:  # the program continues, whatever makes a census fail
            if is_programs_exception(error):
                raise
            return Answer(pid=os.getpid(), refused=f"the census failed ({type(error).__name__}: {error})")
        finally:
            self.lock.release()

    def _counters_only(self, deadline: Deadline, *, late: bool) -> Answer:
        """Return the counters without owners: most requests are for a process that hangs.

        Args:
            late: the last attempt was a copy, which took too long.
        """
        passed = duration(deadline.passed_s)
        why = (
            f"the census took longer than {passed}; ask again with a longer --timeout"
            if late
            else f"for {passed} the process was inside a backward, whose graph must not be read, in a census "
            "of its own, or importing torch"
        )
        return Answer(
            pid=os.getpid(),
            host=socket.gethostname(),
            time=time.time(),
            ledgers=take_ledgers(None, dict(self.baselines)),
            notes=[f"no owners and no holders: {why}"],
            **self._placed(deadline),
        )

    def _placed(self, deadline: Deadline) -> dict[str, Any]:
        """Return the fields of an answer that say where the run stands now."""
        position = self.progress.position
        return {
            "rank": self.identity.rank,
            "run_id": self.identity.run_id,
            "argv": self.argv,
            "step": position.step,
            "microbatch": position.microbatch,
            "doing": position.phase,
            "waited_s": round(deadline.passed_s, 6),
        }


@dataclass(slots=True)
class _Looking:
    """A census that a copy of this process is taking.

    Attributes:
        copy: the copy.
        placed: fields of the answer that say where the run stood, and how long it stood still.
    """

    copy: Copy
    placed: dict[str, Any]

    def result(self, within_s: float) -> Answer | None:
        """Wait for the answer; None if the copy was lost."""
        text = self.copy.result(within_s)
        if text is None:
            return None
        return replace(msgspec.json.decode(text, type=Answer), **self.placed)
