"""When another thread can inspect a program's objects, and for how long.

The interpreter passes its lock on after a time slice; with a longer slice a thread keeps it longer.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Final

from memtriage.observe.frames import stacks
from memtriage.process.stdlib import os, time

_SLICE_S: Final = 0.1
"""Twenty times the usual slice: the longest time that another thread waits for the interpreter."""
_fork_is_watched = False


class Alone:
    """`with Alone():` keeps the interpreter's lock in this thread for `_SLICE_S` at a time.

    To inspect a program whose main thread is outside Python (a collective that waits, a long copy) and may
    return meanwhile. Work that does not need the interpreter continues.
    """

    def __enter__(self) -> None:
        _watch_fork()
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(_SLICE_S)
        # A thread that already waits for the interpreter uses the old slice: give it its turn.
        time.sleep(2 * self._before)

    def __exit__(self, *exception: object) -> None:
        sys.setswitchinterval(self._before)


def _watch_fork() -> None:
    """Restore the usual slice in forked children, where `__exit__` never runs."""
    global _fork_is_watched
    if not _fork_is_watched:
        usual = sys.getswitchinterval()
        os.register_at_fork(after_in_child=lambda: sys.setswitchinterval(usual))
        _fork_is_watched = True


def backward_runs() -> bool:
    """Whether any thread of this process is inside the autograd engine.

    The engine frees what nodes have saved without the interpreter's lock: they must not be read meanwhile. It
    is recognized in Python's stacks: every way into the engine has a frame of `_engine_run_backward`.
    """
    return any(is_engine(frame.f_code) for stack in stacks().values() for frame in stack)


def imports_torch() -> bool:
    """Whether torch is only partly imported: its objects cannot be told apart yet."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def is_engine(code: CodeType) -> bool:
    """Return whether a function is the one that every way into the autograd engine has a frame of."""
    return code.co_name == _ENGINE and code.co_filename.endswith(_ENGINE_FILE)


_ENGINE: Final = "_engine_run_backward"
_ENGINE_FILE: Final = os.path.join("torch", "autograd", "graph.py")
