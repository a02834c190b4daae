"""A watched process is asked for a census: when it can be looked at, and what else it knows of itself."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from memtriage.account.asked import take_answer
from memtriage.account.ledgers import take_ledgers
from memtriage.model.asked import Answer
from memtriage.model.units import duration
from memtriage.observe.alone import Alone
from memtriage.observe.main_thread import MainThreadCall
from memtriage.session.listen import Deadline
from memtriage.store.layout import RankIdentity

_TRY_AGAIN_S: Final = 0.002
_MAIN_WITHIN_S: Final = 1.0
"""How long the main thread may stay in code outside of Python before it is no longer waited for."""


class Watched(Protocol):
    """What is needed of a session."""

    identity: RankIdentity
    argv: list[str]
    step_count: int
    microbatch: int
    phase: Any
    training_thread: int | None

    @property
    def running(self) -> bool: ...


class Lock(AbstractContextManager[Any], Protocol):
    """A `threading.RLock`."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...
    def release(self) -> None: ...
    def _is_owned(self) -> bool: ...


def answer(
    session: Watched, lock: Lock, baselines: Mapping[int, int], script_root: str | None, within_s: float
) -> Answer:
    """A census of this process, or why there is none.

    It is taken by the main thread, between two instructions of the program and not inside a backward. Where
    that thread does not come back to Python code in time, as in a job that hangs, this thread takes it.

    Args:
        session: the watch.
        lock: what the watch holds while it makes a mark, and takes before a backward.
        baselines, script_root: as `memtriage.account.asked.take_answer` has them.
        within_s: how long to wait for such an instant.
    """
    deadline = Deadline(within_s)

    def look() -> Answer | None:
        if lock._is_owned() or not lock.acquire(blocking=False):
            return None  # in the middle of a mark, which may be taking a census of its own
        try:
            # Another thread that has said so may be on its way into the engine, where nobody sees it yet.
            if session.phase == "backward" and session.training_thread != threading.get_ident():
                return None
            return _placed(take_answer(baselines, script_root), session, deadline)
        except Exception as error:  # whatever a census fails at, the program goes on
            return Answer(pid=os.getpid(), refused=f"the census failed ({type(error).__name__}: {error})")
        finally:
            lock.release()

    if threading.current_thread() is threading.main_thread():  # a script of `sys.remote_exec`
        return look() or Answer(pid=os.getpid(), refused="it is inside a mark or a backward", retry=True)
    while session.running:
        # Longer than this who asked does not wait for the census itself (`session.ask`).
        reached, found = MainThreadCall(look).result(min(_MAIN_WITHIN_S, deadline.left_s), within_s)
        if not reached:
            with Alone():
                found = look()
        if found is not None:
            return found
        if not deadline.left_s:
            return _unlooked(session, baselines, deadline)
        time.sleep(_TRY_AGAIN_S)
    return Answer(pid=os.getpid(), refused="its watch has ended")


def _placed(found: Answer | None, session: Watched, deadline: Deadline) -> Answer | None:
    if found is None:
        return None
    found.rank = session.identity.rank
    found.run_id = session.identity.run_id
    found.argv = session.argv
    found.step, found.microbatch, found.doing = session.step_count, session.microbatch, session.phase
    found.waited_s = round(max(0.0, deadline.passed_s - found.paused_s), 6)
    return found


def _unlooked(session: Watched, baselines: Mapping[int, int], deadline: Deadline) -> Answer:
    """What can be told without looking at objects: a process that hangs is the one that is asked most."""
    bare = Answer(
        pid=os.getpid(),
        host=socket.gethostname(),
        time=time.time(),
        ledgers=take_ledgers(None, dict(baselines)),
        notes=[
            f"no owners and no holders: for {duration(deadline.passed_s)} the process was inside a backward, "
            "whose graph must not be read, or in a census of its own"
        ],
    )
    _placed(bare, session, deadline)
    return bare
