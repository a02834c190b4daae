"""The GPU's driver, as the allocator sees it."""

from __future__ import annotations

from memtriage.allocator.driver import TOP, Driver

MIB = 1 << 20


def test_addresses_fall_in_whole_pages_of_the_gpu() -> None:
    driver = Driver()
    assert TOP == 0x7FFF_0000_0000
    assert driver.allocate(2 * MIB, 0, (0, 0)) == TOP - 2 * MIB
    assert driver.allocate(2 * MIB + 1, 0, (0, 0)) == TOP - 6 * MIB
    assert driver.reserve(1, 0, (0, 0)) == TOP - 8 * MIB
    assert driver.used == 4 * MIB + 1


def test_memory_is_out_when_all_of_it_is_in_use() -> None:
    driver = Driver(10 * MIB)
    first = driver.allocate(6 * MIB, 0, (0, 0))
    assert first is not None
    assert driver.allocate(4 * MIB + 1, 0, (0, 0)) is None
    assert not driver.map(0, 4 * MIB + 1)
    assert (driver.map(0, 4 * MIB), driver.used) == (True, 10 * MIB)
    assert not driver.take(1)
    driver.unmap(0, 4 * MIB)
    driver.release(first, 6 * MIB)
    assert driver.used == 0


def test_a_virtual_range_takes_no_memory() -> None:
    driver = Driver(0)
    assert driver.reserve(1 << 40, 0, (0, 0)) == TOP - (1 << 40)
    assert (driver.used, driver.allocate(1, 0, (0, 0))) == (0, None)
