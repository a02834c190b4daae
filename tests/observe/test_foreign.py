"""Whether an exception is the watched program's, or a failure of the watch itself."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from memtriage.observe import foreign
from memtriage.observe.foreign import WrappedHandler, is_programs_exception, programs_own


class InTime(Exception):
    """What a program raises in its handlers."""


class Handler:
    def __call__(self, signum: int, frame: FrameType | None) -> None:
        raise KeyError("too late")

    def method(self, signum: int, frame: FrameType | None) -> None:
        raise KeyError("too late")


def function(signum: int, frame: FrameType | None) -> None:
    raise KeyError("too late")


def caught(work: Callable[[], object]) -> BaseException:
    """What a function raises, as the function that called it, of the watch, would see it."""
    try:
        work()
    except BaseException as error:
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next)
    raise AssertionError("nothing was raised")


def in_file(file: str, source: str, **names: Any) -> Callable[[], object]:
    """A function `work` as if it were written in a file."""
    exec(compile(source, file, "exec"), names)
    made: Callable[[], object] = names["work"]
    return made


def own(source: str, **names: Any) -> Callable[[], object]:
    return in_file(foreign.__file__, source, **names)


@pytest.fixture
def install() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


class Installed(WrappedHandler):
    """A handler of the watch around one of the program's."""

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        raise AssertionError("no signal comes")


HANDLERS = [function, Handler(), Handler().method, Installed(function), Installed(Handler())]
NAMES = ["function", "object", "method", "wrapped function", "wrapped object"]


@pytest.mark.parametrize("handler", HANDLERS, ids=NAMES)
def test_what_an_installed_handler_raises_is_the_programs(
    install: Callable[[Any], None], handler: Any
) -> None:
    error = caught(own("def work(): run(10, None)", run=programs_own(handler)))
    assert not is_programs_exception(error)
    install(handler)
    assert is_programs_exception(error)


def test_the_programs_handler_is_the_one_inside() -> None:
    assert programs_own(Installed(function)) is function
    assert programs_own(function) is function
    assert programs_own(signal.SIG_DFL) is signal.SIG_DFL


@pytest.mark.parametrize(
    "source",
    [
        "def work(): raise OSError",
        "def work(): raise error",
        "def work():\n    try: {}[1]\n    except KeyError: raise",
        "def work(): {}['key']",
        "def work(): next(iter(()))",
        "def work(): call()",
    ],
)
def test_what_the_work_of_the_watch_raises_is_its_failure(source: str) -> None:
    program = in_file("/home/user/train.py", "def work(): raise error", error=InTime)
    assert not is_programs_exception(caught(own(source, error=InTime, call=program)))


def of_module(name: str) -> type[Exception]:
    return type("Error", (Exception,), {"__module__": name})


RAISED_BETWEEN = [
    (InTime(), True),
    (InTime("with a text"), True),
    (of_module("__main__")("with a text"), True),
    (of_module("not_loaded")("with a text"), False),
    (OSError(), True),
    (OSError(2, "No such file"), False),
    (StopIteration(), False),
    (MemoryError(), False),
    (RecursionError(), False),
    (AssertionError(), False),
]


@pytest.mark.parametrize(("error", "is_programs"), RAISED_BETWEEN)
def test_what_no_instruction_has_raised_is_the_programs_if_it_may_be(
    error: BaseException, is_programs: bool
) -> None:
    """C raises these at a call: that instruction does not raise by itself."""
    names = {
        "raise_in_c": ctypes.pythonapi.PyErr_SetObject,
        "kind": ctypes.py_object(type(error)),
        "error": ctypes.py_object(error),
    }
    source = "def work(): raise_in_c(kind, error)"
    assert is_programs_exception(caught(own(source, **names))) == is_programs
    assert not is_programs_exception(caught(in_file("/home/user/train.py", source, **names)))


def test_an_exception_that_was_not_raised_is_nobodys() -> None:
    assert not is_programs_exception(InTime())
