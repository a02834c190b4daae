"""Cleanup in forked children of the program: the watch belongs to their parent."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

from memtriage.process.stdlib import os


def call_in_forked_children(method: Callable[[], None]) -> None:
    """Have every forked child call a bound method, for as long as its object lives."""
    os.register_at_fork(after_in_child=functools.partial(_call, weakref.WeakMethod(method)))


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """A hook on fork can't be taken back: it holds no object, and does nothing once that is gone."""
    bound = method()
    if bound is not None:
        bound()
