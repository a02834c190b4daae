"""Calls that the main thread makes between two instructions of what it runs."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.observe import main_thread
from memtriage.observe.main_thread import MainThreadCall


def while_another_thread(asks: Callable[[], Any]) -> Any:
    """Runs `asks` in a thread while this one, the main thread, is busy with Python code."""
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.append(asks()))
    thread.start()
    while thread.is_alive():
        sum(range(100))
    return values[0]


def test_the_main_thread_makes_the_call() -> None:
    made, name = while_another_thread(
        lambda: MainThreadCall(lambda: threading.current_thread().name).result(60.0)
    )
    assert (made, name) == (True, threading.main_thread().name)


class Queue:
    """Stands in for the interpreter's queue of calls."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[Any] = []

    def Py_AddPendingCall(self, call: Any, argument: Any) -> int:
        self.calls.append(ctypes.cast(argument, ctypes.py_object).value)
        return self.status


@pytest.mark.parametrize(
    "give_up",
    [lambda call: call.result(0.01) == (False, None), lambda call: call.ask() and call.cancel()],
    ids=["not in time", "no longer wanted"],
)
def test_a_call_that_is_given_up_is_not_made_later(
    give_up: Callable[[MainThreadCall], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(0)
    monkeypatch.setattr(main_thread.ctypes, "pythonapi", queue)
    calls: list[int] = []
    call = MainThreadCall(lambda: calls.append(1))
    assert give_up(call)
    assert call.queued  # the interpreter still has it
    assert bool(queue.calls[0]) is False
    assert calls == [] and not call.queued


def test_a_call_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    class Called(Queue):
        def Py_AddPendingCall(self, call: Any, argument: Any) -> int:
            pending = ctypes.cast(argument, ctypes.py_object).value
            threads.append(threading.Thread(target=lambda: bool(pending)))  # replaces the main thread
            threads[0].start()
            begun.wait()
            return self.status

    def slow() -> int:
        begun.set()
        go_on.wait()
        return 5

    monkeypatch.setattr(main_thread.ctypes, "pythonapi", Called(0))
    call = MainThreadCall(slow)
    assert call.result(0.01, 0.01) == (True, None)
    assert call.queued
    go_on.set()
    threads[0].join()
    assert not call.queued


def test_a_call_waits_for_its_turn_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Queue):
        """Comes to the first call when the second has asked in vain, and to the second at once."""

        def Py_AddPendingCall(self, call: Any, argument: Any) -> int:
            super().Py_AddPendingCall(call, argument)
            if len(self.calls) == 2:
                bool(self.calls[1])
            return self.status

        def turn(self, seconds: float) -> None:
            bool(self.calls[0])

    queue = Slow(0)
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s, sleep=queue.turn)
    monkeypatch.setattr(main_thread.ctypes, "pythonapi", queue)
    monkeypatch.setattr(main_thread, "time", clock)
    first, second = MainThreadCall(lambda: 1), MainThreadCall(lambda: 2)
    assert first.ask()
    assert second.result(60.0) == (True, 2)
    assert not first.queued


def test_a_call_whose_turn_does_not_come_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_time(seconds: float) -> None:
        clock.now_s += 25.0
        turns.append(seconds)

    turns: list[float] = []
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s, sleep=pass_time)
    monkeypatch.setattr(main_thread.ctypes, "pythonapi", queue := Queue(0))
    monkeypatch.setattr(main_thread, "time", clock)
    first = MainThreadCall(lambda: 1)
    assert first.ask()
    assert MainThreadCall(lambda: 2).result(60.0) == (False, None)
    assert len(turns) == 3
    bool(queue.calls[0])
    assert not first.queued


def test_a_full_queue_is_a_thread_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_thread.ctypes, "pythonapi", Queue(-1))
    call = MainThreadCall(lambda: 5)
    assert call.result(60.0) == (False, None) and not call.queued


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


def test_one_call_at_a_time() -> None:
    second = MainThreadCall(lambda: "second")
    first = MainThreadCall(lambda: (second.ask(), first.queued))
    assert while_another_thread(lambda: first.result(60.0)) == (True, (False, True))
    assert not first.queued and not second.queued
    assert while_another_thread(lambda: second.result(60.0)) == (True, "second")


CALL_IN_THE_QUEUE = """
import cProfile, ctypes, sys, threading
from memtriage.observe.main_thread import MainThreadCall

def work():
    ctypes.pythonapi.Py_AddPendingCall(is_true, ctypes.c_void_p(id(other)))
    sorted([2, 1], key=lambda number: -number)  # code in Python begins, with a call in the queue
    called.append("work")

is_true = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)
other, called = [], []
call = MainThreadCall(work)
thread = threading.Thread(target=lambda: call.result(60))
SWITCH_ON
thread.start()
while not called:
    sum(range(100))
print(*called)
"""


@pytest.mark.parametrize("switch_on", ["cProfile.Profile().enable()", "sys.settrace(lambda *event: None)"])
def test_a_call_of_others_in_the_queue_does_no_harm_to_a_traced_program(switch_on: str) -> None:
    source = CALL_IN_THE_QUEUE.replace("SWITCH_ON", switch_on)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout == "work\n", done.stderr
