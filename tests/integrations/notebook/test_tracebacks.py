"""Letting go of tracebacks: finished functions lose their variables, all others keep theirs."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.integrations.notebook.tracebacks import free_tracebacks, last_errors


class Large:
    """Stands for a tensor."""


@pytest.fixture(autouse=True)
def nothing_last() -> Any:
    yield
    for name in ("last_exc", "last_value", "last_type", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)


def shell_with(error: BaseException) -> Any:
    sys.last_value = error
    sys.last_type, sys.last_traceback = type(error), error.__traceback__
    result = SimpleNamespace(error_in_exec=error, error_before_exec=None)
    return SimpleNamespace(
        last_execution_result=result, InteractiveTB=SimpleNamespace(tb=error.__traceback__)
    )


def failing(refs: list[Any]) -> None:
    large = Large()
    refs.append(weakref.ref(large))
    raise KeyError("own")


def caught(call: Any, *given: Any) -> Exception:
    try:
        call(*given)
    except Exception as error:
        _ = [frame.f_locals for frame in frames(error)]  # as IPython reads them
        return error
    raise AssertionError("nothing was raised")


def frames(error: BaseException) -> list[Any]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return found


def test_finished_functions_lose_their_variables() -> None:
    refs: list[Any] = []
    error = caught(failing, refs)
    kept = frames(error)  # even where somebody keeps the frames
    shell = shell_with(error)
    assert refs[0]() is not None
    assert free_tracebacks(shell) == 2  # `failing` and `caught`
    assert refs[0]() is None
    assert kept
    assert error.__traceback__ is None
    assert str(error) == "'own'"
    assert shell.InteractiveTB.tb is None
    assert not any(hasattr(sys, name) for name in ("last_value", "last_type", "last_traceback", "last_exc"))


def test_so_do_those_of_the_errors_that_it_came_from() -> None:
    refs: list[Any] = []

    def chained() -> None:
        large = Large()
        refs.append(weakref.ref(large))
        try:
            failing(refs)
        except KeyError as error:
            raise ExceptionGroup("several", [caught(failing, refs)]) from error

    error = caught(chained)
    shell = shell_with(error)
    assert len(last_errors(shell)) == 3
    del error
    free_tracebacks(shell)
    assert [ref() for ref in refs] == [None, None, None]


def test_a_function_that_waits_to_go_on_keeps_its_variables() -> None:
    refs: list[Any] = []
    failures: list[BaseException] = []

    def waiting() -> Generator[Large]:
        large = Large()
        refs.append(weakref.ref(large))
        try:
            failing(refs)
        except KeyError as error:
            failures.append(error)
        yield large
        yield large

    generator = waiting()
    next(generator)
    free_tracebacks(shell_with(failures[0]))
    assert refs[0]() is next(generator)
    assert refs[1]() is None


def test_a_coroutine_that_ended_loses_them() -> None:
    refs: list[Any] = []

    async def ended() -> None:
        large = Large()
        refs.append(weakref.ref(large))
        raise KeyError("own")

    def start() -> None:
        asyncio.run(ended())

    free_tracebacks(shell_with(caught(start)))
    assert refs[0]() is None


def test_without_an_error_nothing_happens() -> None:
    result = SimpleNamespace(error_in_exec=None, error_before_exec=None)
    shell = SimpleNamespace(last_execution_result=result, InteractiveTB=SimpleNamespace())
    assert free_tracebacks(shell) == 0
