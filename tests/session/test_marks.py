"""Which marks are written: all while they are few, then the program's own and some of the others."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from memtriage.model.position import TrainingPosition
from memtriage.observe.counters import CounterReader, Reading
from memtriage.session.marks import STORING, MarkPoint, StoredMarks, StoringPolicy


class Lines:
    """Stands for the record."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def write(self, kind: str, record: Any) -> None:
        assert kind == "mark"
        self.marks.append(record)


def stored(lines: Lines, policy: StoringPolicy = STORING) -> StoredMarks:
    return StoredMarks(lines, CounterReader(), 5, policy)  # type: ignore[arg-type]


def test_marks_thin_out_but_for_the_programs_own() -> None:
    lines = Lines()
    marks = stored(lines, StoringPolicy(dense=3))
    for step in range(100):
        here = TrainingPosition(step=step, microbatch=1, time_s=step / 100)
        marks.at_mark(MarkPoint("step", here, [Reading("cpu", step)]))
        if step == 90:
            marks.at_mark(MarkPoint("after refit", here, [Reading("cpu", step), Reading("cuda:0", 7)]))
    steps = [mark.step for mark in lines.marks if mark.name == "step"]
    assert steps[:3] == [0, 1, 2] and len(steps) < 20
    own = [(mark.device, mark.allocated, mark.rank) for mark in lines.marks if mark.name == "after refit"]
    assert own == [("cpu", 90, 5), ("cuda:0", 7, 5)]
    assert all(mark.host_rss > 0 for mark in lines.marks)


def chosen(steps: int) -> list[int]:
    return [number for number in range(1, steps + 1) if STORING.chosen(number)]


def test_the_record_of_a_ten_times_longer_run_hardly_grows() -> None:
    assert len(chosen(200_000)) - len(chosen(20_000)) == pytest.approx(STORING.dense * math.log(10), rel=0.02)


def test_no_stretch_of_a_course_is_left_out() -> None:
    assert chosen(STORING.dense) == [*range(1, STORING.dense + 1)]
    numbers = chosen(100_000)
    assert all(after - before <= 1 + 0.011 * after for before, after in pairwise(numbers))


@pytest.mark.parametrize("period", range(2, 10))
def test_all_of_a_period_is_written(period: int) -> None:
    """Such as evaluations at every second step."""
    places = Counter(number % period for number in chosen(50_000))
    assert min(places.values()) > 0.8 * max(places.values())


def test_steps_and_backwards_thin_out_each_by_itself() -> None:
    lines = Lines()
    marks = stored(lines)
    for step in range(1, 2001):
        for name in ("backward", "step"):
            marks.at_mark(MarkPoint(name, TrainingPosition(step=step), [Reading("cpu", step)]))
    by_name = [[mark.step for mark in lines.marks if mark.name == name] for name in ("backward", "step")]
    assert by_name == [chosen(2000)] * 2


def test_slow_steps_are_all_written() -> None:
    lines = Lines()
    marks = stored(lines, StoringPolicy(dense=1))
    for step in range(20):
        here = TrainingPosition(step=step, time_s=step * STORING.longest_s)
        marks.at_mark(MarkPoint("step", here, [Reading("cpu", step)]))
    assert [mark.step for mark in lines.marks] == [*range(20)]
