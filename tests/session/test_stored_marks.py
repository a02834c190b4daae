"""Which marks are written: all while they are few, then the program's own and some of the others."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.observe.counters import CounterReader, Reading
from memtriage.session import stored_marks
from memtriage.session.stored_marks import StoredMarks


class Lines:
    """Stands for the record."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def write(self, kind: str, record: Any) -> None:
        assert kind == "mark"
        self.marks.append(record)


def test_marks_thin_out_but_for_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_marks, "_DENSE_MARKS", 3)
    lines = Lines()
    marks = StoredMarks(lines, CounterReader(), 5)  # type: ignore[arg-type]
    for step in range(100):
        marks.add("step", step / 16, [Reading("cpu", step)], step, 1)
        if step == 90:
            marks.add("after refit", step / 16, [Reading("cpu", step), Reading("cuda:0", 7)], step, 1)
    steps = [mark.step for mark in lines.marks if mark.name == "step"]
    assert steps[:3] == [0, 1, 2]
    assert steps[3:8] == [4, 6, 8, 10, 12]  # a tenth of a second apart or more
    own = [(mark.device, mark.allocated, mark.rank) for mark in lines.marks if mark.name == "after refit"]
    assert own == [("cpu", 90, 5), ("cuda:0", 7, 5)]
    assert all(mark.host_rss > 0 for mark in lines.marks)
