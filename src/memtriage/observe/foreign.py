"""Whether an exception comes from the watched program or is a failure of the watch itself.

Code that catches `Exception` around work of the watch in the program's threads must not catch the program's:
a timeout that a signal handler raises, or what another thread sets with `PyThreadState_SetAsyncExc`.
"""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, Final

from memtriage.observe.classes import module_of, stored
from memtriage.observe.exceptions import traceback_of
from memtriage.observe.loaded_modules import module_variable
from memtriage.observe.origin import CodeOrigin


class WrappedHandler:
    """A signal handler of the watch that contains the program's.

    Attributes:
        handler: the program's handler.
    """

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler


def programs_own(handler: Any) -> Any:
    """Return the program's handler inside the installed one."""
    return handler.handler if isinstance(handler, WrappedHandler) else handler


def is_programs_exception(error: BaseException) -> bool:
    """Whether an exception came into the watch's work from outside, not from what the work does.

    It did if a signal handler that could not be held back raised it, or if the instruction at which it was
    raised cannot raise: `PyThreadState_SetAsyncExc` raises between two instructions. If the watch calls the
    program's code by mistake, what that raises is a failure of the watch. So is any exception that cannot be
    classified: an audit hook of the program may refuse what is read here.
    """
    try:
        return _is_from_outside(error)
    except Exception:
        return False


def _is_from_outside(error: BaseException) -> bool:
    origin = CodeOrigin()
    handlers = _codes_of_handlers()
    last: TracebackType | None = None
    within_program = False
    trace = traceback_of(error)
    while trace is not None:
        code = trace.tb_frame.f_code
        if code in handlers:
            return True
        within_program = within_program or origin.is_user_file(code.co_filename)
        last, trace = trace, trace.tb_next
    if last is None or within_program or _raises(last, type(error)):
        return False
    return not vars(BaseException)["args"].__get__(error) or _is_users_class(type(error), origin)


def _codes_of_handlers() -> set[CodeType]:
    """The Python code that runs when one of the installed signal handlers is called."""
    codes = set()
    for signum in signal.valid_signals():
        handler: Any = programs_own(signal.getsignal(signum))
        function = handler.__func__ if type(handler) is MethodType else handler
        if type(function) is not FunctionType:
            function = stored(handler, "__call__")
        if type(function) is FunctionType:
            codes.add(function.__code__)
    return codes


def _is_users_class(kind: type, origin: CodeOrigin) -> bool:
    name = module_of(kind)
    return name == "__main__" or origin.is_user_file(module_variable(sys.modules.get(name), "__file__"))


_RAISED_IN_C: Final = (StopIteration, MemoryError, RecursionError, AssertionError)
"""Exceptions without a text that the interpreter itself raises."""


def _raises(trace: TracebackType, kind: type[BaseException]) -> bool:
    """Whether the instruction at which a traceback ends raises by itself."""
    operation = trace.tb_frame.f_code.co_code[trace.tb_lasti]
    return issubclass(kind, _RAISED_IN_C) or dis.opname[operation] in ("RAISE_VARARGS", "RERAISE")
