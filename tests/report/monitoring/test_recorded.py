"""The gauges of a recorded run: as of its last line."""

from __future__ import annotations

import msgspec
import pytest

from memtriage.model.run_status import MOST_NAMES
from memtriage.report.monitoring.recorded import status_of
from memtriage.store.records import End
from support.runs import GIB, MIB, gpu_rank, leak


def test_a_rank_stands_where_its_last_mark_left_it() -> None:
    end = End(verdict="leak", steps=41, peak_allocated={"cuda:2": 9 * GIB}, passing={"cuda:2": 2 * GIB})
    record = gpu_rank(
        2, 4, growth=164 * MIB, findings=(leak(), leak(kind="host_limit")), end=end, own_mark="refit"
    )
    where = status_of(record)
    latest = {mark.device: mark for mark in where.latest}
    last = [mark for mark in record.marks if mark.device == "cuda:2"][-1]
    assert latest.keys() == {"cpu", "cuda:2"} and latest["cuda:2"] == last
    assert (where.rank, where.steps) == (2, 41)
    assert where.marked_at == 1_700_000_000 + record.marks[-1].time_s
    assert where.growth == pytest.approx({"cuda:2": 164 * MIB, "cpu": MIB})
    assert where.limits == {"cuda:2": 79 * GIB, "host": 512 * GIB}
    assert where.stranded == {"cuda:2": 2 * GIB + 100 * MIB}
    assert where.peak_allocated == {"cuda:2": 9 * GIB}
    assert where.passing == {"cuda:2": 2 * GIB}
    assert where.host_rss == record.marks[-1].host_rss and where.host_pinned == 512 * MIB
    assert sum(where.host_classes.values()) == record.ledgers["host"].total
    assert where.leaks == (leak(),)
    named = {(mark.name, mark.device) for mark in where.named}
    assert {("refit", "cuda:2"), ("step", "cpu"), ("backward", "cuda:2")} <= named


def test_a_rank_that_has_written_nothing_yet_has_no_figures() -> None:
    record = gpu_rank(steps=1)
    record.marks, record.ledgers = [], {}
    where = status_of(record)
    assert (where.latest, where.growth, where.host_rss) == ((), {}, None)


def test_names_of_marks_are_bounded() -> None:
    record = gpu_rank(steps=1)
    (first,) = [mark for mark in record.marks if mark.name == "start"]
    for number in range(2 * MOST_NAMES):
        record.marks.append(msgspec.structs.replace(first, name=f"step {number}"))
    assert len({mark.name for mark in status_of(record).named}) == MOST_NAMES
