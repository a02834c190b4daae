"""Threads of the watch: the program does not see them, and they take none of its signals."""

from __future__ import annotations

import signal
import threading

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
