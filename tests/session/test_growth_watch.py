"""What a watch takes for itself must not look like growth of the program."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.model.position import TrainingPosition
from memtriage.observe.counters import CounterReader, Reading
from memtriage.observe.malloc import malloc_info
from memtriage.session.growth_watch import GrowthWatch
from memtriage.session.marks import MarkPoint

MIB = 1024**2
pytestmark = pytest.mark.skipif(malloc_info() is None, reason="no counter of malloc")


class WorkingScheduler:
    """Keeps memory, as censuses do, and lets the watch's own recorder start before every other mark."""

    def __init__(self, watch: GrowthWatch) -> None:
        self.recorder = watch._investigator._sites
        self.kept: list[bytearray] = []
        self.values: list[Mapping[str, int]] = []
        self.works = True

    def at_mark(self, name: str, position: TrainingPosition, values: Mapping[str, int]) -> None:
        self.values.append(values)
        if not self.works:
            return
        if position.step % 2:
            self.recorder.trace_objects()
        else:
            self.recorder.collect()
        self.kept.append(bytearray(4 * MIB))
        time.sleep(0.001)


@pytest.fixture
def watch() -> Iterator[GrowthWatch]:
    unused: Any = SimpleNamespace(before_census=None, take=None, is_due=lambda: False)
    made = GrowthWatch(
        CounterReader(),
        unused,
        unused,
        script_root=None,
        say=lambda text: None,
        report=lambda leaks: None,
        rank=None,
        batches_vary=lambda: False,
    )
    made.install()
    yield made
    made.remove()


def mark(step: int) -> MarkPoint:
    info = malloc_info()
    assert info is not None
    return MarkPoint("backward", TrainingPosition(step=step), [Reading("cpu", allocated=info.in_use)])


def test_memory_that_the_watch_keeps_is_subtracted_while_recorders_run(watch: GrowthWatch) -> None:
    scheduler: Any = WorkingScheduler(watch)
    watch.scheduler = scheduler
    traced: list[list[object]] = []
    for step in range(1, 9):
        traced = [[step]] * 4096  # traced by tracemalloc, which takes memory of malloc's for that
        watch.at_mark(mark(step))
    scheduler.works = False
    watch.at_mark(mark(9))
    read = [values["cpu"] for values in scheduler.values if "cpu" in values]
    assert len(traced) == 4096
    assert len(scheduler.kept) == 8
    assert len(read) == 5  # malloc's counter is disturbed while a recorder is on
    assert max(read) - min(read) < MIB
