"""The thread that calls the driver ends in any case, and hands over what it did or what went wrong."""

from __future__ import annotations

import pytest

from memtriage.model.units import MIB
from memtriage.treat.compaction.driver_thread import DriverThread
from memtriage.treat.compaction.move import MoveProgress
from memtriage.treat.compaction.prepare import Prepared
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
    driver.wait_until_started()
    driver.wait_until_emptying()
    driver.wait_until_moved()
    with pytest.raises(RuntimeError, match="a device error"):
        driver.finish()
