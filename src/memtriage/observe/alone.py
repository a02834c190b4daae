"""When a program's objects can be looked at from a thread that is not the program's, and for how long.

The interpreter hands its lock on after a time slice; with a longer slice it stays longer with who has it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

from memtriage.observe.frames import current_frames
from memtriage.process.stdlib import os, time

_SLICE_S: Final = 0.1
"""Twenty of the usual slices: the longest that another thread waits for the interpreter."""
_fork_is_watched = False


class Alone:
    """`with Alone():` keeps the interpreter to this thread for `_SLICE_S` at a stretch.

    For a look at a program whose main thread is elsewhere (a collective that waits, a long copy), and may
    come back meanwhile. Work that needs no interpreter goes on.
    """

    def __enter__(self) -> None:
        _watch_fork()
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(_SLICE_S)
        # A thread that waits for the interpreter already uses the old slice: let it have its turn.
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

    The engine frees what nodes have saved without holding the interpreter: they must not be read meanwhile.
    Told by Python's stacks, where every way into the engine leaves the frame of `_engine_run_backward`.
    """
    for top in current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            if code.co_name == _ENGINE and code.co_filename.endswith(_ENGINE_FILE):
                return True
            frame = frame.f_back
    return False


_ENGINE: Final = "_engine_run_backward"
_ENGINE_FILE: Final = os.path.join("torch", "autograd", "graph.py")
