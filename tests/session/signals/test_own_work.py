"""Signal handlers and exceptions of the program that come while the watch is at work."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from memtriage.observe.foreign import is_programs_exception, programs_own
from memtriage.process.untraced import call_untraced
from memtriage.session.signals import own_work
from memtriage.session.signals.own_work import (
    HeldHandler,
    begin_program,
    do_own_work,
    held,
    own_work_in_main_thread,
)


class InTime(Exception):
    pass


@pytest.fixture
def calls() -> Iterator[list[int]]:
    """Numbers of the signals whose held handler has run; SIGUSR1 raises there."""
    seen: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        assert frame is not None and "memtriage/session" not in frame.f_code.co_filename
        seen.append(signum)
        if signum == signal.SIGUSR1:
            raise InTime

    before = {signum: signal.signal(signum, held(handler)) for signum in (signal.SIGUSR1, signal.SIGUSR2)}
    yield seen
    for signum, previous in before.items():
        signal.signal(signum, previous)


def test_a_handler_runs_at_the_end_of_the_work(calls: list[int]) -> None:
    def work() -> None:
        do_own_work(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert calls == []

    with pytest.raises(InTime):
        do_own_work(work)
    assert calls == [signal.SIGUSR1, signal.SIGUSR2]


def test_outside_of_the_work_it_runs_at_once(calls: list[int]) -> None:
    with pytest.raises(InTime):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert calls == [signal.SIGUSR1]


def test_after_the_programs_end_none_runs(calls: list[int]) -> None:
    do_own_work(lambda: os.kill(os.getpid(), signal.SIGUSR1), last=True)
    assert calls == []


def test_a_handler_runs_at_the_end_of_work_between_two_instructions(calls: list[int]) -> None:
    call = own_work_in_main_thread(lambda: [os.kill(os.getpid(), signal.SIGUSR1), list(calls)][1])
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(call.result(60.0)))
    with pytest.raises(InTime):
        thread.start()
        while not answers:
            sum(range(100))
    thread.join()
    assert answers == [(True, [])] and calls == [signal.SIGUSR1]


def test_work_between_two_instructions_is_not_done_inside_other_work() -> None:
    def work() -> list[object]:
        answers: list[object] = []
        call = own_work_in_main_thread(lambda: "done")
        thread = threading.Thread(target=lambda: answers.append(call.result(60.0)))
        thread.start()
        while not answers:
            sum(range(100))
        thread.join()
        return answers

    assert do_own_work(work) == [(True, None)]


def test_a_handler_that_was_replaced_meanwhile_does_not_run(calls: list[int]) -> None:
    def work() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    do_own_work(work)
    assert calls == []


def test_work_of_another_thread_holds_no_handler_back(calls: list[int]) -> None:
    begun, seen = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        seen.wait()

    thread = threading.Thread(target=do_own_work, args=(work,))
    thread.start()
    begun.wait()
    os.kill(os.getpid(), signal.SIGUSR2)
    during = list(calls)
    seen.set()
    thread.join()
    assert during == [signal.SIGUSR2]


def test_what_a_handler_raises_shows_no_frame_of_the_watch(calls: list[int]) -> None:
    with pytest.raises(InTime) as raised:
        os.kill(os.getpid(), signal.SIGUSR1)
    files = {frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)}
    assert files == {__file__}


@pytest.fixture
def same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of a program that has a module of the name of one in the standard library."""
    (tmp_path / "colorsys.py").write_text("WHOSE = 'program'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    yield str(tmp_path)
    begin_program(None)
    sys.modules.pop("colorsys", None)


def test_the_programs_modules_are_out_of_the_way_until_the_outermost_work_ends(same_name: str) -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append("colorsys" in sys.modules or same_name in sys.path)

    def work() -> None:
        look()
        do_own_work(look)
        look()

    begin_program(same_name)
    import colorsys

    do_own_work(work)
    assert seen == [False, False, False]
    assert sys.modules["colorsys"] is colorsys and sys.path[0] == same_name


def test_what_the_work_raises_is_raised() -> None:
    raised = KeyError("of the work")

    def fails() -> None:
        raise raised

    with pytest.raises(KeyError) as caught:
        do_own_work(fails)
    assert caught.value is raised


def test_only_what_can_be_called_is_held() -> None:
    assert held(signal.SIG_IGN) is signal.SIG_IGN
    own = held(print)
    assert type(own) is HeldHandler and programs_own(own) is print and held(own) is own


def test_an_exception_of_another_thread_is_the_programs() -> None:
    states: list[bool] = []
    running = threading.Event()

    def tell(error: BaseException) -> None:
        states.append(is_programs_exception(error))

    names: dict[str, Any] = {"running": running, "InTime": InTime, "tell": tell}
    source = """
def work():
    try:
        while True:
            running.set()
    except InTime as error:
        tell(error)
"""
    exec(compile(source, own_work.__file__, "exec"), names)  # as if it were the watch's own code
    thread = threading.Thread(target=names["work"])
    thread.start()
    running.wait()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(InTime))
    thread.join()
    assert states == [True]


def test_an_error_that_cannot_be_told_is_a_failure_of_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError

    monkeypatch.setattr("memtriage.observe.foreign.CodeOrigin", refuse)
    assert not is_programs_exception(InTime())


def test_in_a_function_of_the_watch_the_handler_gets_the_programs_frame() -> None:
    given: list[FrameType | None] = []
    handler = HeldHandler(lambda signum, frame: given.append(frame))
    call_untraced(lambda: handler(signal.SIGUSR1, sys._getframe(1)))
    assert given == [sys._getframe()]
