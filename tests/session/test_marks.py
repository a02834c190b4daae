"""Which marks are written: all while they are few, then the program's own and some of the others."""

from __future__ import annotations

from typing import Any

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


def test_marks_thin_out_but_for_the_programs_own() -> None:
    lines = Lines()
    marks = StoredMarks(lines, CounterReader(), 5, StoringPolicy(dense=3))  # type: ignore[arg-type]
    for step in range(100):
        here = TrainingPosition(step=step, microbatch=1, time_s=step / 16)
        marks.at_mark(MarkPoint("step", here, [Reading("cpu", step)]))
        if step == 90:
            marks.at_mark(MarkPoint("after refit", here, [Reading("cpu", step), Reading("cuda:0", 7)]))
    steps = [mark.step for mark in lines.marks if mark.name == "step"]
    assert steps[:3] == [0, 1, 2]
    assert steps[3:8] == [4, 6, 8, 10, 12]  # a tenth of a second apart or more
    own = [(mark.device, mark.allocated, mark.rank) for mark in lines.marks if mark.name == "after refit"]
    assert own == [("cpu", 90, 5), ("cuda:0", 7, 5)]
    assert all(mark.host_rss > 0 for mark in lines.marks)


def written(steps: int, step_s: float) -> int:
    """How many marks of so many steps are written."""
    stored, last_s = 0, 0.0
    for step in range(steps):
        if STORING.due(stored, last_s, step * step_s):
            stored, last_s = stored + 1, step * step_s
    return stored


def test_the_record_of_a_ten_times_longer_run_hardly_grows() -> None:
    short, long = written(20_000, 0.002), written(200_000, 0.002)
    assert long - short <= 250
    assert short - STORING.dense <= 350


def test_long_runs_write_a_mark_every_few_seconds() -> None:
    assert not STORING.due(STORING.dense, 1e6, 1e6 + 4.9)
    assert STORING.due(STORING.dense, 1e6, 1e6 + 5.0)
