"""Limits of the kernel that the program has set for itself, and that must not end it for the watch's work."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from memtriage.process.stdlib import time

with suppress(ImportError):  # Windows has no such limits; `explain` and others use `surviving_writes` there
    import resource

_OF_WRITES: Final = tuple(getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name))


@contextmanager
def surviving_writes() -> Iterator[None]:
    """Keep the signals from the program that a write in the block causes when it fails.

    They are SIGPIPE, where nobody reads the pipe, and SIGXFSZ, where the file would exceed `RLIMIT_FSIZE`.
    Python ignores both. A program that has set the default action, as command-line tools do, would die.
    """
    if all(signal.getsignal(signum) is signal.SIG_IGN for signum in _OF_WRITES):
        yield
        return
    callers = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_WRITES)
        programs = signal.sigpending()
        yield
    finally:
        for signum in signal.sigpending().intersection(_OF_WRITES) - programs:
            signal.sigtimedwait([signum], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, callers)


@contextmanager
def own_processor_time() -> Iterator[None]:
    """Give the block processor time of its own where the program has lowered `RLIMIT_CPU`.

    The soft limit is the hard one meanwhile, and after the block higher by the seconds that it took.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if soft in (resource.RLIM_INFINITY, hard):
        yield
        return
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    try:
        yield
    finally:
        soft += math.ceil(time.process_time() - began)
        resource.setrlimit(
            resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )


@contextmanager
def lifted_memory_limit() -> Iterator[None]:
    """Lift the soft limit of this process's address space to the hard one, and put it back.

    For a look at a program that is dead: where it ran into a limit of its own, a census does not fit either.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
