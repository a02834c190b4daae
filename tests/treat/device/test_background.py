"""Work that a signal cannot cut short."""

from __future__ import annotations

import signal
import threading

import pytest

from memtriage.treat.device.background import BackgroundTask


def test_the_result_is_given() -> None:
    assert BackgroundTask(lambda: 42).result() == 42


def test_what_the_work_raises_is_raised() -> None:
    def failing() -> None:
        raise ValueError("in there")

    with pytest.raises(ValueError, match="in there"):
        BackgroundTask(failing).result()


def test_an_interrupt_is_raised_only_when_the_work_is_done() -> None:
    waiting, done = threading.Event(), []

    def work() -> None:
        waiting.wait()
        signal.raise_signal(signal.SIGINT)
        done.append(sum(range(3_000_000)))

    beside = BackgroundTask(work)
    with pytest.raises(KeyboardInterrupt):
        waiting.set()
        beside.result()
    beside._thread.join()
    assert done
