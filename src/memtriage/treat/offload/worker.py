"""The one thread in which an optimizer moves and computes, and how the caller waits for it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from memtriage.treat.offload.lanes import Lane


class Worker:
    """Runs jobs one after another, in order, behind the work that the caller's streams had at that moment."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="memtriage-offload")
        self._owner_pid = os.getpid()
        self._under_way: list[Future[None]] = []

    def submit(self, lanes: Iterable[Lane], job: Callable[[], None]) -> Future[None]:
        """Queue a job; its copies begin when what the current streams have to do by now is done.

        Raises:
            RuntimeError: in a forked child, which has no such thread.
        """
        if os.getpid() != self._owner_pid:
            raise RuntimeError("this OffloadedAdamW belongs to the parent process; make one in this process")
        behind = [(lane, lane.here()) for lane in lanes]
        future = self._executor.submit(_behind, behind, job)
        self._under_way = [one for one in self._under_way if not one.done()] + [future]
        return future

    def run(self, lanes: Iterable[Lane], job: Callable[[], None]) -> None:
        """Run a job and wait for it, to its end even if the caller is interrupted meanwhile.

        The caller's current streams wait for the copies; the host need not.
        """
        lanes = list(lanes)
        future = self.submit(lanes, job)
        try:
            future.result()
        finally:
            # Ctrl-C while waiting: half a step must not stay behind.
            wait([future])
            for lane in lanes:
                lane.settle()

    def close(self, then: Callable[[], None]) -> None:
        """Take no more jobs, drop those that wait, call `then` once no job is under way: now, or later."""
        if os.getpid() != self._owner_pid:
            return  # a forked child has nothing to give back, and locks that nobody will ever release
        self._executor.shutdown(wait=False, cancel_futures=True)
        # An optimizer can be let go of, by a collection in any thread, while backward's work is still done.
        for one in self._under_way:
            if one.running():
                one.add_done_callback(lambda _: then())
                return
        then()


def _behind(before: list[tuple[Lane, torch.cuda.Event | None]], job: Callable[[], None]) -> None:
    for lane, event in before:
        lane.follow(event)
    with torch.no_grad():
        job()


def weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """A hook that does not keep the method's object alive, and does nothing once it is gone."""
    reference = weakref.WeakMethod(method)

    def hook(argument: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(argument)

    return hook
