"""Calls that the main thread makes between two instructions of what it runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from memtriage.observe import main_thread
from memtriage.observe.main_thread import MainThreadCall


def while_another_thread(asks: Callable[[], Any]) -> Any:
    """Runs `asks` in a thread while this one, the main thread, is busy with Python code."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(asks()))
    thread.start()
    while thread.is_alive():
        sum(range(100))
    return found[0]


def test_the_main_thread_makes_the_call() -> None:
    made, name = while_another_thread(
        lambda: MainThreadCall(lambda: threading.current_thread().name).result(60.0)
    )
    assert (made, name) == (True, threading.main_thread().name)
    assert main_thread._waiting == set()


class Queue:
    """Stands in for the interpreter's queue of calls."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[Any] = []

    def Py_AddPendingCall(self, call: Any, argument: Any) -> int:
        self.calls.append(ctypes.cast(argument, ctypes.py_object).value)
        return self.status


def test_a_call_that_timed_out_is_not_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue(0)
    monkeypatch.setattr(main_thread.ctypes, "pythonapi", queue)
    calls: list[int] = []
    assert MainThreadCall(lambda: calls.append(1)).result(0.01) == (False, None)
    assert len(main_thread._waiting) == 1  # the interpreter still has it
    assert bool(queue.calls[0]) is False
    assert calls == []
    assert main_thread._waiting == set()


def test_a_call_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    class Called(Queue):
        def Py_AddPendingCall(self, call: Any, argument: Any) -> int:
            pending = ctypes.cast(argument, ctypes.py_object).value
            threads.append(threading.Thread(target=lambda: bool(pending)))  # stands in for the main thread
            threads[0].start()
            begun.wait()
            return self.status

    def slow() -> int:
        begun.set()
        go_on.wait()
        return 5

    monkeypatch.setattr(main_thread.ctypes, "pythonapi", Called(0))
    assert MainThreadCall(slow).result(0.01, 0.01) == (True, None)
    go_on.set()
    threads[0].join()
    assert main_thread._waiting == set()


def test_a_full_queue_is_a_thread_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_thread.ctypes, "pythonapi", Queue(-1))
    assert MainThreadCall(lambda: 5).result(60.0) == (False, None)
    assert main_thread._waiting == set()


def test_what_interrupts_the_call_is_raised_in_the_program() -> None:
    raised = TimeoutError("in time")

    def interrupted() -> None:
        raise raised

    with pytest.raises(TimeoutError) as caught:
        while_another_thread(lambda: MainThreadCall(interrupted).result(60.0))
    assert caught.value is raised


def test_a_call_need_not_be_waited_for() -> None:
    calls: list[int] = []
    call = MainThreadCall(lambda: calls.append(1))
    while_another_thread(call.ask)
    while call.queued:
        sum(range(100))
    assert calls == [1]
    assert not call.cancel()


def test_a_call_that_is_no_longer_wanted_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(0)
    monkeypatch.setattr(main_thread.ctypes, "pythonapi", queue)
    calls: list[int] = []
    call = MainThreadCall(lambda: calls.append(1))
    assert call.ask() and call.cancel() and call.queued
    assert bool(queue.calls[0]) is False
    assert calls == [] and not call.queued
