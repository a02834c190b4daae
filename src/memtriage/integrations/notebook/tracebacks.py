"""What IPython keeps from the last error, and how to release it.

A traceback holds the frames of the functions that the error ended, and a frame holds every local variable:
the batch, activations, whole models. IPython keeps it for `%debug` and `%tb` until the next error.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from typing import Any, Final

from memtriage.observe.objects import instances

_LAST: Final = ("last_exc", "last_value", "last_type", "last_traceback")
_SUSPENDED: Final = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}
_MAY_SUSPEND: Final = 0x0020 | 0x0080 | 0x0200  # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR


def last_errors(shell: Any) -> list[BaseException]:
    """Return the errors that the interpreter and IPython keep, and those that they came from; each once."""
    result = shell.last_execution_result
    waiting = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    waiting += [getattr(result, name, None) for name in ("error_in_exec", "error_before_exec")]
    errors: dict[int, BaseException] = {}
    while waiting:
        error = waiting.pop()
        if not isinstance(error, BaseException) or id(error) in errors:
            continue
        errors[id(error)] = error
        waiting += [error.__cause__, error.__context__]
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
    return list(errors.values())


def free_tracebacks(shell: Any) -> int:
    """Release the last error's traceback wherever IPython and the interpreter keep it.

    The variables of its finished functions go; functions that still run, or wait to go on, keep theirs.
    `%tb` and `%debug` have nothing to show afterwards. The errors themselves stay what they are, without
    their tracebacks.

    Returns:
        How many functions' variables were released.
    """
    errors = last_errors(shell)
    traces = [error.__traceback__ for error in errors]
    traces += [getattr(sys, "last_traceback", None), getattr(shell.InteractiveTB, "tb", None)]
    cleared = _clear([frame for trace in traces for frame in _frames(trace)])
    traces.clear()
    for error in errors:
        error.__traceback__ = None
    errors.clear()
    for name in _LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    shell.InteractiveTB.tb = None
    gc.collect()
    return cleared


def _frames(trace: types.TracebackType | None) -> Iterator[types.FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _clear(frames: list[types.FrameType]) -> int:
    """Empty the frames that have ended; how many those were."""
    waiting: set[int] = set()
    if any(frame.f_code.co_flags & _MAY_SUSPEND for frame in frames):
        # Before Python 3.13 `clear` on one that is suspended ends its generator.
        waiting = {id(frame) for frame in _suspended()}
    cleared = 0
    for frame in {id(frame): frame for frame in frames if id(frame) not in waiting}.values():
        try:
            frame.clear()
        except RuntimeError:  # it runs
            continue
        if frame.f_code.co_flags & 0x0001:  # a function: before 3.13 the frame keeps a copy, synchronized so
            _ = frame.f_locals
            cleared += 1
    return cleared


def _suspended() -> Iterator[types.FrameType]:
    for suspended in instances(lambda kind: any(kind is known for known in _SUSPENDED)):
        frame = getattr(suspended, _SUSPENDED[type(suspended)])
        if frame is not None:
            yield frame
