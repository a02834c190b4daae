"""Which marks are written: all while they are few, then the program's own and some of the others."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.model.position import TrainingPosition
from memtriage.observe.counters import CounterReader, Reading
from memtriage.session import marks as marks_module
from memtriage.session.marks import MarkPoint, StoredMarks


class Lines:
    """Stands for the record."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def write(self, kind: str, record: Any) -> None:
        assert kind == "mark"
        self.marks.append(record)


def test_marks_thin_out_but_for_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks_module, "_DENSE_MARKS", 3)
    lines = Lines()
    marks = StoredMarks(lines, CounterReader(), 5)  # type: ignore[arg-type]
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
