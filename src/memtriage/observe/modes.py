"""Modes of the interpreter and of torch that a recording uses unseen by the program.

Meanwhile the program may read and set each of them as without the recording: its own setting counts, and
remains afterwards. Forked children have the program's setting.
"""

from __future__ import annotations

import functools
import importlib
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from memtriage.process.forks import call_in_forked_children
from memtriage.process.replaced import Replaced


class Tracing:
    """`tracemalloc`, which the program sees as off while only the watch has it on.

    If the program starts it, it takes it over: what was traced until then is dropped, because the program
    does not expect it.
    """

    def __init__(self) -> None:
        self._functions = Replaced(tracemalloc)
        self._start, self._stop, self._is_tracing = (
            tracemalloc.start, tracemalloc.stop, tracemalloc.is_tracing
        )  # fmt: skip
        self._borrowed = False
        self._reading = False
        call_in_forked_children(self.stop)

    @property
    def borrowed(self) -> bool:
        """Whether it is only on for the watch."""
        return self._borrowed and self._is_tracing()

    def install(self) -> None:
        """Replace the functions of `tracemalloc`. Called before the program can bind their names."""
        while_off = {
            "stop": None,
            "clear_traces": None,
            "reset_peak": None,
            "is_tracing": False,
            "get_traced_memory": (0, 0),
            "get_traceback_limit": 1,
            "get_object_traceback": None,
        }
        self._functions.put(
            start=self._started_by_program,
            **{name: self._unseen(getattr(tracemalloc, name), idle) for name, idle in while_off.items()},
        )

    def remove(self) -> None:
        """Restore the functions, and switch tracing off if it is the watch's."""
        self.stop()
        self._functions.restore()

    def start(self, frames: int) -> bool:
        """Switch it on unless it is on already; return whether it is on for the watch."""
        if not self._is_tracing():
            self._start(frames)
            self._borrowed = True
        return self._borrowed

    def stop(self) -> None:
        """Switch it off if it is the watch's."""
        if self.borrowed:
            self._stop()
        self._borrowed = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In this block, the functions of `tracemalloc` return what the watch has traced."""
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    def _started_by_program(self, nframe: int = 1) -> None:
        self.stop()
        self._start(nframe)

    def _unseen(self, function: Callable[..., Any], idle: object) -> Callable[..., Any]:
        @functools.wraps(function)
        def asked(*args: Any) -> Any:
            return idle if self.borrowed and not self._reading else function(*args)

        return asked


class AnomalyMode:
    """Autograd's anomaly mode without its NaN check: every node remembers the stack of its forward call.

    It is off while a backward runs, where it would make new nodes refer to those they came from. If the
    program switches the mode itself, only its setting counts from then on.

    The stacks have no source lines. torch calls `format_stack` of `torch.fx.traceback` inside an operation of
    the program. That function reads files, which would fail if the program has replaced `os.stat`.
    """

    def __init__(self) -> None:
        self._functions: Replaced | None = None
        self._stacks: Replaced | None = None
        self._set: Callable[[bool, bool], None] | None = None
        self._programs = (False, True)
        self._inside_backward = False
        call_in_forked_children(self.stop)

    @property
    def borrowed(self) -> bool:
        """Whether it is on for the watch, or only off during a backward."""
        return self._set is not None and not self._programs[0]

    def start(self) -> bool:
        """Switch it on unless it is on already; return whether it is on for the watch."""
        torch = sys.modules.get("torch")
        if torch is None or self._set is not None or torch.is_anomaly_enabled():
            return self.borrowed
        self._set = torch.set_anomaly_enabled
        self._programs = (False, torch.is_anomaly_check_nan_enabled())
        # Not as an attribute of torch: the import system first looks up a loaded module by its full name.
        self._stacks = Replaced(importlib.import_module("torch.fx.traceback"))
        self._functions = Replaced(torch)
        self._functions.put(
            set_anomaly_enabled=self._set_by_program,
            is_anomaly_enabled=lambda: self._programs[0],
            is_anomaly_check_nan_enabled=lambda: self._programs[1],
        )
        self._apply()
        return True

    def in_backward(self, inside: bool) -> None:
        """Switch it off inside a backward, and on after it."""
        self._inside_backward = inside
        self._apply()

    def stop(self) -> None:
        """Restore the mode that the program has set. May be called twice."""
        if self._functions is not None and self._set is not None and self._stacks is not None:
            self._functions.restore()
            self._stacks.restore()
            self._set(*self._programs)
        self._functions = self._stacks = self._set = None

    def _set_by_program(self, enabled: bool, check_nan: bool = True) -> None:
        self._programs = (bool(enabled), bool(check_nan))
        self._apply()

    def _apply(self) -> None:
        if self._set is not None and self._stacks is not None:
            ours = not self._programs[0] and not self._inside_backward
            self._stacks.restore()
            if ours:
                self._stacks.put(format_stack=_caller_stack)
            self._set(*((True, False) if ours else self._programs))


def _caller_stack() -> list[str]:
    """Return the caller's stack as `traceback.format_stack` does, without source lines."""
    entries = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        entries.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
        frame = frame.f_back
    entries.reverse()
    return entries
