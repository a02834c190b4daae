"""Pausing Python's cyclic garbage collector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memtriage.process.stdlib import gc, os


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause automatic collection in the block."""
    collects = pause_collector()
    try:
        yield
    finally:
        resume_collector(collects)


def pause_collector() -> bool:
    """Switch automatic collection off and return what `resume_collector` needs to put it back.

    A child that another thread forks meanwhile has it as it was.
    """
    global _pauses
    collects = gc.isenabled()
    gc.disable()
    _pauses += collects
    return collects


def resume_collector(collects: bool) -> None:
    """Put automatic collection back to what it was before `pause_collector`."""
    global _pauses
    if collects:
        _pauses -= 1
        gc.enable()


def _resume_in_child() -> None:
    global _pauses
    if _pauses:
        _pauses = 0
        gc.enable()


_pauses = 0
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_resume_in_child)
