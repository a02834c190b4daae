"""Following records: whatever the pieces in which a file grows, the same is read, and nothing twice."""

from __future__ import annotations

import io
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.store import tail
from memtriage.store.reader import read_rank
from memtriage.store.records import End, Note
from memtriage.store.tail import COURSE_POINTS, Course, RankTail, RunTail


def mark(step: int, name: str = "step", device: str = "cuda:0", allocated: int | None = 100) -> Mark:
    return Mark(
        name=name, step=step, microbatch=0, rank=0, time_s=float(step), device=device, allocated=allocated
    )


def line(t: str, /, **fields: Any) -> bytes:
    return json.dumps({"t": t, **fields}, separators=(",", ":")).encode() + b"\n"


def mark_line(step: int, **fields: Any) -> bytes:
    plain = {"name": "step", "step": step, "microbatch": 0, "rank": 0, "time_s": step, "device": "cpu"}
    return line("mark", **(plain | {"allocated": 10 * step} | fields))


RECORD = (
    line("start", run_id="r", rank=0, world_size=1, time=1000.0, pid=1, host="elsewhere")
    + mark_line(1)
    + line("host", time_s=1.0, rss=7)
    + mark_line(2, name="after refit")
    + line("ledger", device="cpu", total=5, source="s", rows=[{"row": "a", "bytes": 5}])
    + line("finding", kind="leak", device="cpu", final=False)
    + line("note", text="a sentence")
    + b'{"t":"mark","name":"st\n'  # cut when the disk was full
    + mark_line(3)
    + line("end", verdict="leak", steps=3)
)


@given(st.lists(st.integers(0, len(RECORD)), max_size=8))
def test_however_a_record_grows_the_same_is_read_as_at_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "rank-00000.jsonl"
    path.touch()
    following = RankTail(path)
    for end in [*sorted(cuts), len(RECORD)]:
        with path.open("ab") as file:
            file.write(RECORD[path.stat().st_size : end])
        following.read()
    assert following.as_record() == read_rank(path)
    assert following.record.cut_lines == 1


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(name of the run, bytes) of each reading of a file."""
    found: list[tuple[str, int]] = []

    class Counted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(-1 if size is None else size) or b""
            found.append((Path(str(self.name)).parent.parent.name, len(data)))
            return data

    monkeypatch.setattr(tail, "open_record", lambda path: Counted(path, "rb"))
    return found


def test_nothing_is_read_twice(tmp_path: Path, write_rank: Any, reads: list[tuple[str, int]]) -> None:
    path = write_rank(steps=50, end=None)
    following = RunTail([tmp_path / "runs"], look_again_s=0.0)
    assert following.poll()
    assert reads == [("run", path.stat().st_size)]
    assert not following.poll()
    new = mark_line(51)
    with path.open("ab") as file:
        file.write(new)
    assert following.poll()
    assert reads[1:] == [("run", len(new))]


def test_one_read_gives_the_record_its_marks_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(mark_line(2) + mark_line(1))
    following = RankTail(path)
    assert following.read()
    assert [mark.step for mark in following.as_record().marks] == [1, 2]
    with path.open("ab") as file:
        file.write(mark_line(3))
    following.read()
    assert [mark.step for mark in following.as_record().marks] == [1, 2, 3]


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(mark_line(1) + mark_line(2)[:-30])
    following = RankTail(path)
    following.read()
    assert following.last is not None and following.last.step == 1
    with path.open("ab") as file:
        file.write(mark_line(2)[-30:])
    following.read()
    assert following.last.step == 2
    assert following.record.cut_lines == 0


def test_a_file_that_is_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(RECORD)
    following = RankTail(path)
    following.read()
    path.write_bytes(mark_line(7))
    following.read()
    assert [found.step for found in following.as_record().marks] == [7]
    assert following.record.end is None


def test_a_second_run_in_the_same_file_is_the_one_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(RECORD + line("start", run_id="r", time=2000.0) + mark_line(1, allocated=3))
    following = RankTail(path)
    following.read()
    assert following.as_record() == read_rank(path)
    assert following.peaks == {"cpu": 3}


@given(st.integers(1, 6 * COURSE_POINTS))
def test_a_long_course_is_thinned_evenly_and_keeps_its_latest(count: int) -> None:
    course = Course()
    for step in range(count):
        course.add(mark(step))
    steps = [recorded.step for recorded in course.marks()]
    assert len(steps) <= COURSE_POINTS + 1
    assert steps[0] == 0 and steps[-1] == count - 1
    gaps = {after - before for before, after in pairwise(steps[:-1])}
    assert len(gaps) <= 1


def test_a_program_that_numbers_its_marks_does_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(b"".join(mark_line(step, name=f"batch {step}") for step in range(5000)))
    following = RankTail(path)
    while following.read():
        continue
    assert following.as_record().last_step == 4999
    assert len(following.record.marks) < 50 + 2 * COURSE_POINTS


def test_latest_and_peak_are_those_of_marks_with_a_figure(tmp_path: Path, write_rank: Any) -> None:
    extra = [
        ("mark", mark(4, device="cpu", allocated=70)),
        ("mark", mark(5, device="cpu", allocated=50)),
        ("mark", mark(6, device="cpu", allocated=None)),
        ("mark", mark(6, name="end", device="cpu", allocated=1)),
    ]
    following = RankTail(write_rank(extra=extra))
    following.read()
    assert following.latest["cpu"].allocated == 50
    assert following.peaks == {"cuda:0": 1003, "cpu": 70}
    assert following.last is not None and following.last.name == "end"


def test_ranks_that_appear_later_are_found(tmp_path: Path, write_rank: Any) -> None:
    (tmp_path / "runs").mkdir()
    following = RunTail([tmp_path / "runs"], look_again_s=0.0)
    assert not following.poll()
    assert following.waiting is not None and "no memtriage record in it" in following.waiting
    write_rank(1, world_size=3)
    assert following.poll()
    assert following.waiting is None
    write_rank(0, world_size=3)
    write_rank(2, world_size=3, end=None)
    following.poll()
    assert [record.number for record in following.run().ranks] == [0, 1, 2]


def test_a_restart_takes_over(tmp_path: Path, write_rank: Any) -> None:
    write_rank(0, world_size=2, time=1000.0)
    write_rank(1, world_size=2, time=1000.0)
    following = RunTail([tmp_path / "runs"], look_again_s=0.0)
    following.poll()
    assert following.run().ranks[0].start.restart == 0
    write_rank(0, world_size=2, restart=1, time=2000.0, steps=1)
    following.poll()
    run = following.run()
    assert [(record.number, record.start.restart) for record in run.ranks] == [(0, 1)]


def test_the_newest_run_is_found_without_reading_others_again(
    tmp_path: Path, write_rank: Any, reads: list[tuple[str, int]]
) -> None:
    write_rank(run="old", time=1000.0)
    write_rank(run="new", time=2000.0)
    following = RunTail([tmp_path / "runs"], look_again_s=0.0)
    following.poll()
    assert following.run().ranks[0].start.run_id == "new"
    assert sum(size for run, size in reads if run == "old") > 0
    reads.clear()
    following.poll()
    assert sum(size for _, size in reads) == 0


def test_a_file_that_vanishes_is_no_error(tmp_path: Path, write_rank: Any) -> None:
    write_rank(0, world_size=2)
    gone = write_rank(1, world_size=2)
    following = RunTail([tmp_path / "runs"])
    following.poll()
    os.unlink(gone)
    following.poll()
    assert len(following.run().ranks) == 2  # as far as it was read; the next look drops the file


def test_what_is_no_mark_is_kept_as_the_reader_keeps_it(tmp_path: Path, write_rank: Any) -> None:
    ledger = Ledger(device="cuda:0", total=3, source="x", rows=[LedgerRow(row="a", bytes=3)])
    path = write_rank(extra=[("ledger", ledger), ("note", Note(text="n"))], end=None)
    following = RankTail(path)
    following.read()
    assert following.as_record().ledgers == {"cuda:0": ledger}
    assert following.record.notes == ["n"]
    with path.open("ab") as file:
        file.write(line("end", verdict="clean"))
    following.read()
    assert following.record.end == End(verdict="clean")


def test_a_longer_file_that_replaces_one_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, other = tmp_path / "rank-00000.jsonl", tmp_path / "other"
    path.write_bytes(mark_line(1))
    following = RankTail(path)
    following.read()
    other.write_bytes(mark_line(7) + mark_line(8))
    other.rename(path)
    following.read()
    assert [found.step for found in following.as_record().marks] == [7, 8]


def test_a_start_that_cannot_be_read_is_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(mark_line(1) + line("start", time="yesterday") + mark_line(2))
    following = RankTail(path)
    following.read()
    assert following.record.cut_lines == 1
    assert [found.step for found in following.as_record().marks] == [1, 2]


def test_the_start_that_counts_is_looked_for_only_in_what_is_new(tmp_path: Path, write_rank: Any) -> None:
    first = write_rank(run="first", time=1000.0, end=None)
    write_rank(run="second", time=2000.0)
    following = RunTail([tmp_path / "runs"], look_again_s=0.0)
    following.poll()
    assert following.run().ranks[0].start.run_id == "second"
    with first.open("ab") as file:
        file.write(line("start", run_id="third", time=3000.0) + mark_line(1))
    following.poll()
    assert following.run().ranks[0].start.run_id == "third"
