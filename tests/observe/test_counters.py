"""The counters of a mark: fresh or missing, never old."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.model.blocks import DeviceCounters
from memtriage.observe import counters
from memtriage.observe.counters import MALLOC, CounterReader, Reading, uncounted

FAST, SLOW = 1e-6, 1e-3


class World:
    """A clock, a malloc that takes its time, and devices."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cost = FAST
        self.waits = 0.0
        self.waited = 0.0
        self.in_use = 0
        self.malloc_reads = 0
        self.reserved: dict[int, int | None] = {}
        self.used: dict[int, int | None] = {}
        self.pinned = 0

    def malloc(self) -> Any:
        self.malloc_reads += 1
        self.in_use += 1
        self.waited += self.waits
        self.now += self.cost + self.waits
        return SimpleNamespace(in_use=self.in_use, from_kernel=10 * self.in_use)

    def device(self, device: int) -> DeviceCounters:
        return DeviceCounters(allocated=device + 5, reserved=self.reserved[device], requested=device + 3)

    def host_pinned(self) -> Any:
        self.pinned += 1
        return SimpleNamespace(owned=self.pinned)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(counters.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(counters.time, "thread_time", lambda: made.now - made.waited)
    monkeypatch.setattr(counters.malloc, "malloc_info", made.malloc)
    monkeypatch.setattr(counters.cuda, "initialized", lambda: bool(made.reserved))
    monkeypatch.setattr(counters.cuda, "devices", lambda: list(made.reserved))
    monkeypatch.setattr(counters.cuda, "counters", made.device)
    monkeypatch.setattr(counters.cuda, "capturing", lambda: False)
    monkeypatch.setattr(counters.driver, "used", lambda device: made.used[device])
    monkeypatch.setattr(counters.host, "pinned", made.host_pinned)
    return made


def cpu(reader: CounterReader, within_step: bool = False) -> Reading:
    return reader.read(within_step)[0]


def warmed_up(world: World) -> CounterReader:
    """A reader past the marks at the start of a run, which all have a reading."""
    reader = CounterReader()
    for _ in range(MALLOC.always):
        world.now += 1e-5
        assert cpu(reader).allocated == world.in_use
    return reader


def test_fast_malloc_is_read_at_every_mark(world: World) -> None:
    reader = warmed_up(world)
    for _ in range(50):
        assert cpu(reader) == Reading("cpu", world.in_use, 10 * world.in_use)


def test_first_marks_have_readings_whatever_they_cost(world: World) -> None:
    world.cost = SLOW
    warmed_up(world)


def test_marks_of_steps_are_read_where_malloc_is_slow(world: World) -> None:
    reader = warmed_up(world)
    world.cost = SLOW
    for _ in range(1000):
        world.now += SLOW / MALLOC.step_share
        assert cpu(reader).allocated == world.in_use


def share_read(world: World, reader: CounterReader, within_step: bool) -> float:
    """The share of the time that readings take at marks which follow one another closely."""
    began, before = world.now, world.malloc_reads
    for _ in range(10_000):
        world.now += SLOW / 10
        reading = cpu(reader, within_step)
        assert reading.allocated in (None, world.in_use)  # never an old figure
        assert (reading.allocated is None) is (reading.reserved is None)
    return (world.malloc_reads - before) * world.cost / (world.now - began)


def test_a_slow_reading_is_not_made_at_each_step(world: World) -> None:
    reader = warmed_up(world)
    world.cost = SLOW
    assert share_read(world, reader, False) == pytest.approx(MALLOC.step_share, rel=0.1)


def test_marks_within_a_step_have_what_is_left_of_the_budget(world: World) -> None:
    reader = warmed_up(world)
    world.cost = SLOW
    cpu(reader)
    cpu(reader)  # slow twice: that is no chance
    budget = MALLOC.within_step_share
    assert budget / 2 <= share_read(world, reader, True) <= budget
    share_read(world, reader, False)  # the steps' own: more than the budget
    assert share_read(world, reader, True) == 0


def test_one_slow_reading_is_chance(world: World) -> None:
    reader = warmed_up(world)
    world.cost = SLOW
    cpu(reader)
    world.cost = FAST
    assert cpu(reader).allocated == world.in_use


def test_waiting_for_the_processor_is_no_cost(world: World) -> None:
    reader = warmed_up(world)
    world.waits = SLOW
    for _ in range(10):
        assert cpu(reader).allocated == world.in_use


def test_another_library_for_malloc(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.malloc, "malloc_info", lambda: None)
    assert cpu(CounterReader()) == Reading("cpu")


def test_devices(world: World) -> None:
    world.reserved, world.used = {0: 70, 2: None}, {0: 100, 2: 50}
    _, first, second = CounterReader().read()
    assert first == Reading("cuda:0", 5, 70, 3, 30, world.device(0))
    assert second == Reading("cuda:2", 7, None, 5, None, world.device(2))  # unknown is not zero


def test_memory_outside_is_never_negative(world: World) -> None:
    world.reserved, world.used = {0: 70}, {0: 60}
    assert CounterReader().read()[1].outside == 0


def test_driver_is_asked_once_a_second_at_most(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def used(device: int) -> int:
        asked.append(device)
        return 100

    monkeypatch.setattr(counters.driver, "used", used)
    world.reserved = {0: 70}
    reader = CounterReader()
    for _ in range(25):
        reader.read()
        world.now += 0.1
    assert len(asked) == 3


def test_a_capture_is_not_disturbed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.reserved, world.used = {0: 70}, {0: 100}
    monkeypatch.setattr(counters.cuda, "capturing", lambda: True)
    assert CounterReader().read()[1].outside is None


def test_new_devices_are_noticed(world: World) -> None:
    world.reserved, world.used = {0: 70}, {0: 100, 1: 100}
    reader = CounterReader()
    assert len(reader.read()) == 2
    world.reserved[1] = 10
    lengths = {len(reader.read()) for _ in range(40)}
    assert lengths == {2, 3}


def test_pinned_memory_is_none_without_cuda(world: World) -> None:
    reader = CounterReader()
    assert reader.pinned() is None
    world.reserved = {0: 1}
    assert reader.pinned() == 1
    assert {reader.pinned() for _ in range(20)} == {1, 2, 3}


def test_devices_without_a_counter_are_named_once() -> None:
    assert uncounted(["xpu:0", "cpu", "cuda:0", "mps:0", "xpu:0"]) == ["mps:0", "xpu:0"]


def test_host_figures_are_those_of_this_process() -> None:
    reader = CounterReader()
    rss, in_use = reader.rss(), reader.in_use()
    assert rss is not None
    assert in_use is not None
    assert 0 < in_use.shared < in_use.resident < in_use.mapped
    assert in_use.resident == pytest.approx(rss, rel=0.1)
