"""Threads of the watch: the program does not see them, and they take none of its signals."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from memtriage.process.threads import OwnThread


def test_a_thread_that_the_program_does_not_see() -> None:
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        threading.current_thread()  # as a library may do
        inside.set()
        leave.wait()

    before = threading.enumerate()
    thread = OwnThread(work)
    thread.start()
    assert inside.wait(60) and thread.is_alive and not thread.is_current and not thread.join(0)
    leave.set()
    assert thread.join(60) and not thread.is_alive
    assert threading.enumerate() == before


def test_a_thread_that_takes_no_signal_of_the_program() -> None:
    blocked: list[set[int]] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    thread = OwnThread(lambda: blocked.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, []))))
    thread.start()
    assert thread.join(60)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert {signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM} <= blocked[0]
    assert signal.SIGSEGV not in blocked[0]


def test_a_thread_that_has_not_started_or_has_ended_needs_no_waiting() -> None:
    thread = OwnThread(lambda: None)
    assert not thread.is_alive and not thread.is_current and thread.join(0)
    thread.start()
    assert thread.join() and not thread.is_alive and thread.join(0)


def test_a_thread_does_not_wait_for_itself() -> None:
    answers: list[bool] = []

    def work() -> None:
        answers.extend([thread.is_current, thread.join(0)])

    thread = OwnThread(work)
    thread.start()
    assert thread.join(60)
    assert answers == [True, False]


def test_what_the_work_raises_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("of the watch")

    thread = OwnThread(fail)
    thread.start()
    assert thread.join(60) and capsys.readouterr().err == ""


def test_where_no_thread_can_be_had_nothing_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise RuntimeError("can't start new thread")

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    thread = OwnThread(lambda: None)
    monkeypatch.setattr("_thread.start_new_thread", refuse)
    with pytest.raises(RuntimeError):
        thread.start()
    assert not thread.is_alive and signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_forked_child_has_no_thread_of_the_watch() -> None:
    leave = threading.Event()
    thread = OwnThread(lambda: leave.wait(60))
    thread.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if not thread.is_alive and thread.join(0) else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert thread.is_alive
    finally:
        leave.set()
        assert thread.join(60)
