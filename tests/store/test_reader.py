import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.store import reader
from memtriage.store.locate import RecordError
from memtriage.store.reader import read_rank, read_run
from memtriage.store.records import End, HostSampleLine, Note, RecordedFinding, Start
from memtriage.store.writer import RankWriter


def leak(holder, final, bytes=1):
    return ("finding", RecordedFinding(kind="leak", device="cuda:0", holder=holder, bytes=bytes, final=final))


def test_everything_that_is_written_is_read(write_rank):
    ledger = Ledger(device="cuda:0", total=5, source="test", rows=[LedgerRow(row="requested", bytes=5)])
    sample = HostSampleLine(time_s=2.0, rss=10, cgroup_usage=20, oom_kill=0)
    path = write_rank(
        2,
        world_size=4,
        extra=[("host", sample), ("ledger", ledger), ("note", Note(text="n")), leak("a", True)],
        host="elsewhere",
        pid=1,
    )
    rank = read_rank(path)
    assert rank.start == Start(run_id="run", rank=2, world_size=4, time=1000.0, host="elsewhere", pid=1)
    assert [mark.step for mark in rank.marks] == [1, 2, 3]
    assert rank.marks[0] == Mark(
        name="step", step=1, microbatch=0, rank=2, time_s=1.0, device="cuda:0", allocated=1001
    )
    assert rank.host == [sample]
    assert rank.ledgers == {"cuda:0": ledger}
    assert rank.notes == ["n"]
    assert rank.findings == [Finding(kind="leak", device="cuda:0", holder="a", bytes=1)]
    assert rank.end == End(verdict="clean", steps=3, time_s=3.0)
    assert rank.cut_lines == 0
    assert rank.last_time_s == 3.0
    assert (rank.number, rank.name) == (2, "rank 2")


def test_steps_and_limits_of_a_record_come_from_its_last_lines(write_rank):
    ended = read_rank(write_rank(run="ended"))
    assert (ended.last_step, ended.name) == (3, "rank 0" if ended.start.rank == 0 else "the process")
    killed = read_rank(write_rank(run="killed", end=None))
    assert (killed.last_step, killed.device_limits, killed.last_time_s) == (3, {}, 3.0)
    killed.marks.clear()
    assert (killed.last_step, killed.last_time_s) == (0, 0.0)
    killed.end = End(verdict="clean", steps=7, device_limits={"cuda:0": 5}, time_s=9.0)
    assert (killed.last_step, killed.device_limits, killed.last_time_s) == (7, {"cuda:0": 5}, 9.0)


def test_only_ledgers_with_a_step_are_of_a_census_at_a_step(write_rank):
    ledgers = [
        ("ledger", Ledger(device="host", total=1, source="test", rows=[], step=step)) for step in (4, None, 6)
    ]
    assert read_rank(write_rank(extra=ledgers)).census_steps == {4, 6}


def test_the_last_ledger_of_a_device_counts(write_rank):
    ledgers = [("ledger", Ledger(device="host", total=total, source="test", rows=[])) for total in (1, 2)]
    assert read_rank(write_rank(extra=ledgers)).ledgers["host"].total == 2


def test_interim_findings_count_only_without_an_end(write_rank):
    interim = [leak("a", False, 1), leak("b", False, 2), leak("a", False, 3)]
    ended = read_rank(write_rank(run="ended", extra=interim))
    killed = read_rank(write_rank(run="killed", extra=interim, end=None))
    assert ended.findings == []
    assert [(finding.holder, finding.bytes) for finding in killed.findings] == [("a", 3), ("b", 2)]


def test_final_findings_replace_interim_ones(write_rank):
    rank = read_rank(write_rank(extra=[leak("early", False), leak("late", True)]))
    assert [finding.holder for finding in rank.findings] == ["late"]


def test_garbled_lines_are_counted_and_unknown_types_are_not(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(
        b'{"t":"start","run_id":"r","unknown_key":1}\n'
        b'{"t":"mark","name":"step","step":1}\n'  # lacks fields
        b'{"t":"mark","name":"step","step":2,"microbatch":0,"rank":null,"time_s":1,"device":"cpu"}\n'
        b'{"device": "cpu", "name": "step", "step": 3, "microbatch": 0, "rank": 0, "time_s": 2,"t": "mark"}\n'
        b'{"t":"of a later version","x":1}\n'
        b"\x00\x00\x00\n"
        b"\xff\xfe\n"
        b"[1, 2]\n"
        b"\n"
        b'{"t":"host","rss":"many"}\n'
        b'{"t":"mark","name":"st'
    )
    rank = read_rank(path)
    assert rank.start.run_id == "r"
    assert [mark.step for mark in rank.marks] == [2, 3]
    assert rank.cut_lines == 6
    assert rank.host == []


def test_of_several_runs_in_a_file_the_last_is_read(write_rank):
    write_rank(steps=5, extra=[leak("old", True)])
    rank = read_rank(write_rank(steps=2, time=2000.0))
    assert len(rank.marks) == 2
    assert rank.findings == []
    assert rank.start.time == 2000.0


def test_a_record_without_a_start_line_is_read(tmp_path):
    path = tmp_path / "rank-00003.jsonl"
    with RankWriter(path) as writer:
        writer.write("mark", Mark(name="step", step=1, microbatch=0, rank=3, time_s=0.0, device="cpu"))
    rank = read_rank(path)
    assert rank.start.rank == 3
    assert len(rank.marks) == 1


@given(cut=st.integers(min_value=0))
def test_a_record_cut_anywhere_is_read_up_to_the_cut(cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "rank-00000.jsonl"
    with RankWriter(path) as writer:
        writer.write("start", Start(run_id="r", time=1.0))
        for step in range(3):
            writer.write(
                "mark", Mark(name="step", step=step, microbatch=0, rank=None, time_s=1.0, device="cpu")
            )
        writer.write("end", End(verdict="clean"))
    whole = path.read_bytes()
    kept = whole[: cut % (len(whole) + 1)]
    path.write_bytes(kept)
    rank = read_rank(path)
    complete = [
        line for line in whole.splitlines() if kept.startswith(whole[: whole.index(line) + len(line)])
    ]
    read = (rank.start.run_id == "r") + len(rank.marks) + (rank.end is not None)
    assert read == len(complete)
    assert rank.cut_lines == (1 if kept.rpartition(b"\n")[2] and read < len(kept.split(b"\n")) else 0)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(RecordError, match="No such file"):
        read_rank(tmp_path / "rank-00000.jsonl")


def test_alive_is_this_process_dead_is_gone_elsewhere_is_unknown(write_rank):
    here = socket.gethostname()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    running = write_rank(run="running", host=here, pid=child.pid)
    reused = write_rank(run="reused", host=here, pid=child.pid, pid_start=1)
    assert read_rank(running).alive is True
    assert read_rank(reused).alive is False
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but still a zombie
    assert read_rank(running).alive is False
    child.communicate()
    assert read_rank(running).alive is False
    assert read_rank(write_rank(run="self", host=here, pid=os.getpid())).alive is True
    assert read_rank(write_rank(run="elsewhere", host="not-" + here, pid=os.getpid())).alive is None
    assert read_rank(write_rank(run="unknown")).alive is None


def test_ranks_come_in_order(tmp_path, write_rank):
    for rank in (2, 0, 1):
        write_rank(rank, world_size=3)
    run = read_run([tmp_path / "runs"])
    assert [rank.start.rank for rank in run.ranks] == [0, 1, 2]
    assert run.notes == []


def test_ranks_of_an_earlier_run_in_the_directory_are_ignored(tmp_path, write_rank):
    for rank in range(4):
        write_rank(rank, world_size=4, time=1000.0)
    for rank in range(2):
        write_rank(rank, world_size=2, time=1100.0)
    run = read_run([tmp_path / "runs"])
    assert [rank.start.rank for rank in run.ranks] == [0, 1]
    assert len(run.notes) == 2
    assert all("earlier run" in note for note in run.notes)


@pytest.mark.parametrize(("time", "ranks"), [(9_396.0, [0]), (9_398.0, [0, 1])])
def test_a_rank_silent_for_ten_minutes_when_the_others_started_is_left_out(tmp_path, write_rank, time, ranks):
    write_rank(0, world_size=2, time=10_000.0)
    write_rank(1, world_size=2, time=time)  # its last line is three seconds later
    assert [rank.start.rank for rank in read_run([tmp_path / "runs"]).ranks] == ranks


def test_of_two_records_of_a_rank_the_newer_is_taken(tmp_path, write_rank):
    write_rank(0, world_size=2, top="node0", time=1000.0, steps=1)
    newer = write_rank(0, world_size=2, top="node1", time=1001.0, steps=2)
    run = read_run([tmp_path / "node0", tmp_path / "node1"])
    assert [rank.path for rank in run.ranks] == [newer]
    assert "repeats rank 0" in run.notes[0]


def test_empty_and_garbled_files_are_named(tmp_path, write_rank):
    path = write_rank(0, world_size=2)
    path.with_name("rank-00001.jsonl").write_bytes(b"garbage")
    run = read_run([tmp_path / "runs"])
    assert len(run.ranks) == 1
    assert "rank-00001.jsonl holds no readable line" in run.notes[0]


def test_a_run_without_any_readable_record(tmp_path):
    (tmp_path / "rank-00000.jsonl").write_bytes(b"")
    with pytest.raises(RecordError, match="no readable record"):
        read_run([tmp_path])


_MARK = {"name": "step", "microbatch": 1, "rank": 0, "time_s": 1.0, "device": "cpu"}
_WRITTEN = {
    "mark": lambda step: b'{"t":"mark",' + json.dumps(_MARK | {"step": step}).encode()[1:],
    "mark with spaces": lambda step: json.dumps({"t": "mark"} | _MARK | {"step": step}).encode(),
    "mark, its type last": lambda step: json.dumps(_MARK | {"step": step} | {"t": "mark"}).encode(),
    "garbled mark": lambda step: b'{"t":"mark","name":"st',
    "note": lambda step: b'{"t":"note","text":"%d"}' % step,
    "empty": lambda step: b"",
    "blank": lambda step: b"  ",
    "unknown": lambda step: b'{"t":"later"}',
    "no record": lambda step: b"garbage",
    "start": lambda step: b'{"t":"start","schema":1,"rank":0,"time":%d.0}' % step,
}


@given(st.lists(st.sampled_from(sorted(_WRITTEN)), max_size=30))
def test_lines_are_read_in_any_order_and_notation(kinds):
    steps, notes, cut, started = [], [], 0, None
    for step, kind in enumerate(kinds):
        if kind == "start":
            steps, notes, cut, started = [], [], 0, float(step)
        elif kind in ("garbled mark", "no record", "blank"):
            cut += 1
        elif kind == "note":
            notes.append(str(step))
        elif kind.startswith("mark"):
            steps.append(step)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-00000.jsonl"
        path.write_bytes(b"".join(_WRITTEN[kind](step) + b"\n" for step, kind in enumerate(kinds)))
        record = read_rank(path)
    assert [mark.step for mark in record.marks] == steps
    assert (record.notes, record.cut_lines, record.start.time) == (notes, cut, started)


def test_reading_ahead_changes_nothing(write_rank, tmp_path):
    for rank in range(40):  # more than are read ahead
        write_rank(rank, world_size=40, extra=[("note", Note(text=str(rank)))])
    (tmp_path / "runs" / "run" / "0" / "rank-00007.jsonl").write_bytes(b"garbage\n")
    plain, ahead = read_run([tmp_path / "runs"]), read_run([tmp_path / "runs"], ahead=True)
    assert ahead == plain
    assert [rank.notes for rank in ahead.ranks] == [[str(rank)] for rank in range(40) if rank != 7]


def test_a_file_that_vanishes_while_reading_ahead_is_told(write_rank, tmp_path, monkeypatch):
    for rank in range(40):
        write_rank(rank, world_size=40)
    open_record = reader.open_record

    def vanished(path):
        if path.name == "rank-00033.jsonl":
            raise FileNotFoundError(2, "No such file or directory")
        return open_record(path)

    monkeypatch.setattr(reader, "open_record", vanished)
    for ahead in (False, True):
        with pytest.raises(RecordError, match=r"rank-00033.jsonl: No such file"):
            read_run([tmp_path / "runs"], ahead=ahead)


def test_the_last_run_of_a_file_counts_whatever_ranks_were_before(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    for run, rank in (("first", None), ("second", 0), ("third", None)):
        with RankWriter(path) as writer:
            writer.write("start", Start(run_id=run, rank=rank))
    assert read_rank(path).start.run_id == "third"
