"""Ending a watched run: waiting for other ranks, for a bounded time, and a report in any case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from memtriage.process.messages import Messages
from memtriage.session import run
from memtriage.session.conclusion import Conclusion
from memtriage.session.core import Session
from memtriage.session.ends import start_record
from memtriage.store.layout import RankIdentity
from memtriage.store.records import End, Start
from memtriage.store.writer import RankWriter
from support.certain import certain


def identity(rank: int | None = None, world_size: int = 1) -> RankIdentity:
    return RankIdentity(run_id="job", restart=0, rank=rank, world_size=world_size, local_rank=rank)


def finished(directory: Path, who: RankIdentity | None = None) -> Session:
    """The session of a rank that has written its record, made without watching anything."""
    session = Session(directory, who or identity(), ["train.py"], None)
    with RankWriter(session.path) as record:
        record.write("start", start_record(session.identity, session.argv, os.getpid(), time.time()))
        record.write("end", End(verdict="clean", steps=3, time_s=1.0))
    return session


def other_rank(directory: Path, rank: int, *, end: bool, world_size: int = 2) -> RankWriter:
    writer = RankWriter(directory / "job" / "0" / f"rank-{rank:05d}.jsonl")
    start = Start(run_id="job", rank=rank, world_size=world_size, pid=os.getpid(), time=time.time())
    writer.write("start", start)
    if end:
        writer.write("end", End(verdict="clean", steps=3))
    return writer


class Clock:
    """Stands in for `time`: sleeping passes at once, and may let something happen."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps = 0
        self.at_sleep: Callable[[int], None] = lambda count: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        self.at_sleep(self.sleeps)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(run, "time", made)
    return made


# --- waiting ------------------------------------------------------------------------------------------------


def test_a_single_process_waits_for_nobody(tmp_path: Path, clock: Clock) -> None:
    session = finished(tmp_path)
    run.wait_for_ranks(session.path.parent, 1, 20.0)
    assert clock.sleeps == 0


@pytest.mark.parametrize("started", [False, True])
def test_the_wait_for_a_rank_that_died_is_bounded(tmp_path: Path, started: bool, clock: Clock) -> None:
    session = finished(tmp_path, identity(0, 2))
    if started:
        other_rank(tmp_path, 1, end=False)
    run.wait_for_ranks(session.path.parent, 2, 3.0)
    assert clock.now == pytest.approx(103.0 if started else 102.0, abs=0.1)


def test_a_cut_last_line_is_no_end(tmp_path: Path, clock: Clock) -> None:
    session = finished(tmp_path)
    with session.path.open("rb+") as file:
        file.truncate(session.path.read_bytes().rindex(b'"t":"end"'))
    run.wait_for_ranks(session.path.parent, 1, 1.0)
    assert clock.sleeps > 0


def test_of_many_ranks_each_end_is_looked_for_until_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    session = finished(tmp_path, identity(0, 64))
    for rank in range(1, 63):
        other_rank(tmp_path, rank, end=True, world_size=64).close()
    last = other_rank(tmp_path, 63, end=False, world_size=64)
    looked: Counter[str] = Counter()
    open_record = run.open_record

    def counted(path: Path) -> BinaryIO:
        looked[path.name] += 1
        return open_record(path)

    monkeypatch.setattr(run, "open_record", counted)
    clock.at_sleep = lambda sleeps: last.write("end", End(verdict="clean")) if sleeps == 9 else None
    run.wait_for_ranks(session.path.parent, 64, 20.0)
    assert clock.sleeps == 9
    assert looked.pop("rank-00063.jsonl") == 10
    assert set(looked.values()) == {1}


def test_the_time_is_over_in_the_middle_of_a_look_at_many_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    session = finished(tmp_path, identity(0, 64))
    for rank in range(1, 64):
        other_rank(tmp_path, rank, end=False, world_size=64).close()

    open_record = run.open_record

    def slow(path: Path) -> BinaryIO:
        clock.now += 1.0  # a shared file system under load
        return open_record(path)

    monkeypatch.setattr(run, "open_record", slow)
    run.wait_for_ranks(session.path.parent, 64, 5.0)
    assert clock.now == 105.0


def test_a_folder_that_is_not_there_ends_with_the_time(tmp_path: Path, clock: Clock) -> None:
    run.wait_for_ranks(tmp_path / "none", 1, 1.0)
    assert clock.now == pytest.approx(101.0, abs=0.1)


# --- running ---------------------------------------------------------------------------------------------

WATCHED = """
import sys
from pathlib import Path
from memtriage.session.run import run_watched
from memtriage.session.runner import ScriptTarget

def before(folder, say):
    say(f"before {folder.name} {folder.parent.name}")

folder = Path(sys.argv[1])
target = ScriptTarget("script", str(folder / "train.py"), ["--lr", "3"])
options = {"before_program": before, **eval(sys.argv[2])}
sys.exit(run_watched(target, folder / "runs", folder / "report.json", **options))
"""


def watched(
    folder: Path, program: str, options: str = "{}", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program under a watch, in a process of its own."""
    (folder / "train.py").write_text(program)
    usual = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-c", WATCHED, str(folder), options],
        env={**usual, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_program_runs_as_it_would_and_is_reported_on(tmp_path: Path) -> None:
    done = watched(tmp_path, "import sys; print(sys.argv[1:]); sys.exit(5)")
    assert (done.returncode, done.stdout) == (5, "['--lr', '3']\n")
    said = json.loads((tmp_path / "report.json").read_text())
    assert (said["verdict"], said["steps"]) == ("not_judged", 0)
    assert "NOT JUDGED" in done.stderr
    assert [path.name for path in tmp_path.glob("runs/*/*/*.jsonl")]
    assert "before 0 " in done.stderr


@pytest.mark.parametrize(
    ("program", "fail_on", "status"),
    [
        ("", "('not_judged',)", 3),
        ("", "('leak', 'error')", 0),
        ("raise SystemExit(4)", "('not_judged',)", 4),
        ("raise KeyError('x')", "()", 1),
    ],
)
def test_a_verdict_fails_only_a_program_that_succeeded(
    tmp_path: Path, program: str, fail_on: str, status: int
) -> None:
    done = watched(tmp_path, program, f"{{'fail_on': {fail_on}}}")
    assert done.returncode == status
    assert ("KeyError: 'x'" in done.stderr) is ("KeyError" in program)


def test_only_the_first_rank_reports(tmp_path: Path) -> None:
    done = watched(tmp_path, "print('ran')", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
    assert not (tmp_path / "report.json").exists()
    (record,) = tmp_path.glob("runs/*/*/*.jsonl")
    assert record.name == "rank-00001.jsonl"


@pytest.mark.parametrize(("rank", "world_size", "verdict"), [("0", "1", "not_judged"), ("1", "2", "None")])
def test_a_watched_block_reports_on_the_first_rank(
    tmp_path: Path, rank: str, world_size: str, verdict: str
) -> None:
    block = "import sys, memtriage\nwith memtriage.watch(sys.argv[1], quiet=True) as watch: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{block}print(watch.report and watch.report.verdict)", str(tmp_path)],
        env={**os.environ, "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{verdict}\n", "")
    assert len(list(tmp_path.glob("*/*/rank-*.jsonl"))) == 1


# --- reporting ----------------------------------------------------------------------------------------------


def test_the_report_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = certain(run.report_run(finished(tmp_path / "runs"), tmp_path / "report.json", 0.0, Messages()))
    assert (report.verdict, report.steps) == ("clean", 3)
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "clean"
    out, err = capsys.readouterr()
    assert out == "" and err.count("CLEAN") == 1


def test_a_quiet_report_is_written_but_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.report_run(finished(tmp_path / "runs"), tmp_path / "report.json", 0.0)
    assert (tmp_path / "report.json").exists()
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("ended", [True, False])
def test_the_ranks_that_were_seen_are_counted(tmp_path: Path, ended: bool) -> None:
    session = finished(tmp_path, identity(0, 3))
    other_rank(tmp_path, 1, end=ended, world_size=3)
    report = certain(run.report_run(session, None, 3.0))
    assert (report.verdict, report.ranks.seen, report.ranks.of) == ("not_judged", 2, 3)


def test_a_report_that_cannot_be_written_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = finished(tmp_path / "runs")
    (tmp_path / "file").write_text("")
    assert run.report_run(session, tmp_path / "file" / "report.json", 0.0, Messages()) is None
    err = capsys.readouterr().err
    assert f"memtriage report {session.path.parent}" in err and "Traceback" not in err


def test_a_quiet_report_that_cannot_be_made_is_none(tmp_path: Path) -> None:
    assert run.report_run(finished(tmp_path), tmp_path, 0.0) is None  # a folder is no file


def test_without_a_record_the_rank_s_own_findings_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    session = finished(Path("/proc/no/such"), identity(0, 2))
    for _ in range(5):
        session.user_step()
    monkeypatch.setattr(Conclusion, "verdict", "out_of_memory")
    session.conclusion.exception_text = "MemoryError"
    report = certain(run.report_run(session, tmp_path / "report.json", 2.0, Messages()))
    assert (report.verdict, report.steps, report.exception) == ("out_of_memory", 5, "MemoryError")
    assert (report.ranks.seen, report.ranks.of) == (1, 2)
    assert "could not be written" in capsys.readouterr().err
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "out_of_memory"
    assert clock.now <= 102.1


CLOSURE = """
import torch
model = torch.nn.Linear(64, 4096)
optimizer = torch.optim.Adam(model.parameters())
validation = torch.utils.data.DataLoader(torch.randn(16, 64), batch_size=16)
kept = []

def closure():
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    return loss

for step in range(80):
    optimizer.step(closure)
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            kept.extend(model(batch) for batch in validation)
        model.train()
"""


def test_an_evaluation_counts_once_where_a_closure_runs_the_backwards(tmp_path: Path) -> None:
    done = watched(tmp_path, CLOSURE)
    report = json.loads((tmp_path / "report.json").read_text())
    (leak,) = (finding for finding in report["findings"] if finding["kind"] == "leak")
    assert leak["event"] == "evaluation", done.stderr
    assert leak["bytes_per_event"] == pytest.approx(16 * 4096 * 4, rel=0.1)
