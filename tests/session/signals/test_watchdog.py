"""When the watchdog sends a signal once more, and which process it means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from memtriage.session.signals import watchdog
from memtriage.session.signals.watchdog import ACKNOWLEDGED, RELEASED, Process, ResendDeadline


def test_deadline_restarts_at_the_acknowledgement() -> None:
    deadline = ResendDeadline(grace_s=2, report_s=30)
    assert deadline.wait_s(100) == watchdog.POLL_S
    deadline.receive(signal.SIGTERM, 100, caught=False)
    deadline.receive(signal.SIGTERM, 101, caught=False)
    assert deadline.take_overdue(101.9) is None
    assert deadline.wait_s(101.5) == 0.5
    deadline.receive(ACKNOWLEDGED, 101.9, caught=False)
    assert deadline.take_overdue(131.8) is None
    assert deadline.take_overdue(131.9) == signal.SIGTERM
    assert deadline.take_overdue(1000) is None


@pytest.mark.parametrize(
    ("byte", "caught"),
    [(signal.SIGTERM, True), (signal.SIGINT, False), (signal.SIGCHLD, False), (ACKNOWLEDGED, False)],
)
def test_deadline_does_not_start(byte: int, caught: bool) -> None:
    deadline = ResendDeadline(grace_s=2, report_s=30)
    deadline.receive(byte, 100, caught=caught)
    assert deadline.take_overdue(1000) is None


def test_an_acknowledged_signal_is_repeated_although_the_handler_is_installed_again() -> None:
    deadline = ResendDeadline(grace_s=2, report_s=30)
    deadline.receive(signal.SIGHUP, 100, caught=True)
    deadline.receive(ACKNOWLEDGED, 100, caught=False)
    deadline.receive(signal.SIGTERM, 110, caught=False)
    assert deadline.take_overdue(129.9) is None
    assert deadline.take_overdue(130) == signal.SIGHUP


def test_process_is_told_from_a_later_one_with_its_number() -> None:
    assert Process(os.getpid()).is_alive()
    assert not Process(os.getpid(), "1").is_alive()
    assert not Process(2**22 + 1).is_alive()
    assert Process(os.getpid()).catches(signal.SIGINT)
    assert not Process(os.getpid()).catches(signal.SIGKILL)


def test_the_watchdog_sleeps_a_second_at_most_and_not_past_its_deadline() -> None:
    deadline = ResendDeadline(grace_s=2, report_s=30)
    deadline.receive(signal.SIGHUP, 100, caught=False)
    assert [deadline.wait_s(now) for now in (100, 101, 101.75, 102, 110)] == [1, 1, 0.25, 0, 0]
    assert deadline.take_overdue(102) == signal.SIGHUP
    assert deadline.wait_s(103) == 1


def test_a_signal_is_repeated_once_for_each_delivery() -> None:
    deadline = ResendDeadline(grace_s=2, report_s=30)
    for at, signum in ((100, signal.SIGTERM), (200, signal.SIGHUP)):
        deadline.receive(signum, at, caught=False)
        assert deadline.take_overdue(at + 2) == signum
        assert deadline.take_overdue(at + 3) is None
    deadline.receive(ACKNOWLEDGED, 300, caught=False)
    assert deadline.take_overdue(1000) is None, "what was repeated needs no report"


def test_bytes_of_the_guard_are_no_signals() -> None:
    assert {ACKNOWLEDGED, RELEASED}.isdisjoint(map(int, signal.valid_signals()))
    assert watchdog.GUARDED == (signal.SIGTERM, signal.SIGHUP)


def test_a_process_that_was_not_waited_for_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Process(child.pid).start_time() == "" and not Process(child.pid).is_alive()


def test_which_signals_a_process_has_a_handler_for() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *given: None)
    try:
        assert Process(os.getpid()).catches(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert not Process(os.getpid()).catches(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not Process(2**22 + 1).catches(signal.SIGUSR1)
