"""The thread that calls the driver ends in any case, and hands over what it did or what went wrong."""

from __future__ import annotations

import signal
import threading

import pytest

from memtriage.model.units import MIB
from memtriage.treat.compaction.driver_thread import DriverThread
from memtriage.treat.compaction.move import MoveProgress, Prepared
from support.compaction import make_world


def test_without_a_plan_it_only_gives_back_what_is_free() -> None:
    world = make_world()
    world.free([world.allocate(20 * MIB)])
    prepared = Prepared(world.device)
    driver = DriverThread(prepared)
    assert driver.finish() == (MoveProgress(), None)
    assert world.device.use().reserved == prepared.reserved == 0


def test_no_wait_outlives_a_thread_that_failed() -> None:
    world = make_world()

    def fail(operation: str) -> None:
        raise RuntimeError("a device error")

    world.device.before = fail
    driver = DriverThread(Prepared(world.device))
    driver.started.wait()
    driver.emptying.wait()
    driver.moved.wait()
    with pytest.raises(RuntimeError, match="a device error"):
        driver.finish()


def test_an_interrupt_is_raised_only_when_the_work_is_done() -> None:
    world = make_world()
    world.free([world.allocate(20 * MIB)])
    waiting, done = threading.Event(), list[int]()

    def before(operation: str) -> None:
        if operation == "empty_cache":
            waiting.wait()
            signal.raise_signal(signal.SIGINT)
            done.append(sum(range(3_000_000)))

    world.device.before = before
    driver = DriverThread(Prepared(world.device))
    with pytest.raises(KeyboardInterrupt):
        waiting.set()
        driver.finish()
    driver._thread.join()
    assert done and world.device.use().reserved == 0
