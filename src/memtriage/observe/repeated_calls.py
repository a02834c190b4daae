"""Notice that a program without steps works: it calls a module again and again, or computes gradients.

Loading and building a model grow like a leak, but call no module in a loop. A hook on all modules would break
torch.compile's graphs. So the stacks of all threads are read now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Final

from memtriage.observe.alone import is_engine
from memtriage.observe.frames import stacks
from memtriage.process.stdlib import os

_CALL: Final = "_wrapped_call_impl"
_CALL_FILE: Final = os.path.join("torch", "nn", "modules", "module.py")
_COMPILED_FILE: Final = os.path.join("torch", "_dynamo", "eval_frame.py")


class RepeatedCalls:
    """Remembers outermost calls of modules, and of functions that torch.compile has compiled.

    Two calls by one instruction are a loop. A call is marked in its frame, because another frame may get its
    address later: by `f_trace`, which only a tracer reads.
    """

    def __init__(self) -> None:
        self._callers: set[tuple[int, int]] = set()

    def seen(self) -> bool:
        """Read the stacks; return whether one shows a repeated call, or the computation of gradients."""
        return any(map(self._seen_in, stacks().values()))

    def _seen_in(self, stack: list[FrameType]) -> bool:
        at = max((at for at, frame in enumerate(stack) if _is_call(frame.f_code)), default=len(stack))
        if at + 1 >= len(stack) or (outermost := stack[at]).f_trace is not None:
            return False
        if is_engine(outermost.f_code):  # inside a call it may be the compiler's, which traces a backward
            return True
        outermost.f_trace = _ignore
        caller = id(stack[at + 1].f_code), stack[at + 1].f_lasti
        again = caller in self._callers
        self._callers.add(caller)
        return again


def _is_call(code: CodeType) -> bool:
    name, filename = code.co_name, code.co_filename
    return (
        (name == _CALL and filename.endswith(_CALL_FILE)) or filename.endswith(_COMPILED_FILE)
    ) or is_engine(code)


def _ignore(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
    """Do nothing: what a tracer that begins during a marked call calls for the events of its frame."""
    return _ignore
