"""The verdict on a job that was started plainly, from what is read of it while it goes on."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from memtriage.cli.app import main
from memtriage.diagnose.verdict import verdict
from memtriage.model.census import HolderGroup
from memtriage.outside.census import JobReader, OutsideCensus, RemoteReading, take_census
from memtriage.outside.memory import ForbiddenError, OutsideError
from memtriage.outside.python_layout import layout_of
from memtriage.session import attach as attaching
from memtriage.session.attach import Attached
from memtriage.session.job_ranks import ranks_of
from support.paths import of_module

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)

_JOB = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
history = []

def train(steps):
    for _ in range(steps):
        hidden = model[0](torch.randn(512, 64))
        loss = model[2](model[1](hidden)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(hidden.detach())
        del history[:-KEPT]

train(20)
print("ready", flush=True)
for line in sys.stdin:
    train(int(line))
    print("done", flush=True)
"""
_STEPS = 4  # so that a leak exceeds what the caches of malloc and of libraries may take in the resident set
_READINGS = 12
_CENSUSES = 5
_SECONDS = 10

Job = subprocess.Popen[str]


@pytest.fixture
def start() -> Iterator[Callable[[str], Job]]:
    """Start jobs that train as many steps as they are told, which end with the test."""
    with ExitStack() as ends:

        def started(kept: str, first: str = "", **variables: str) -> Job:
            job = subprocess.Popen(
                [sys.executable, "-c", first + _JOB.replace("KEPT", kept)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            )
            ends.callback(job.communicate)
            ends.callback(job.kill)
            assert job.stdout is not None and job.stdout.readline() == "ready\n"
            return job

        yield started


def _train(job: Job) -> None:
    assert job.stdin is not None and job.stdout is not None
    job.stdin.write(f"{_STEPS}\n")
    job.stdin.flush()
    assert job.stdout.readline() == "done\n"


def _followed(job: Job, rank: int | None = None, censuses: int = _CENSUSES) -> tuple[Attached, float]:
    """Follow a job that makes as many steps in each second of a clock of its own."""
    attached, now = Attached(job.pid, rank), 0.0
    for _ in range(censuses):
        for _ in range(_READINGS):
            _train(job)
            now += _SECONDS / _READINGS
            attached.read_counters(now)
        attached.add(take_census(job.pid, within_s=600), now)
    return attached, now


def test_a_leak_is_proven_and_its_holder_named(start: Callable[[str], Job]) -> None:
    attached, now = _followed(start("10**9"))
    findings, judged = attached.judgment(now)
    assert verdict(findings, False, judged) == "leak"
    assert findings[0].certainty == "proven"
    assert findings[0].holder == "__main__.history[*]"
    rate = _STEPS * _READINGS / _SECONDS * 512 * 64 * 4
    assert findings[0].bytes_per_second == pytest.approx(rate, rel=0.1)


def test_a_list_that_is_bounded_is_no_leak(start: Callable[[str], Job]) -> None:
    attached, now = _followed(start("10"))
    findings, judged = attached.judgment(now)
    assert not [finding for finding in findings if finding.certainty == "proven"]
    assert verdict(findings, False, judged) in ("clean", "not_judged")
    rows = {row.row for row in attached.ledger()["host"]}
    assert {"anonymous", "library"} <= rows


def test_the_ranks_of_a_job_are_merged(start: Callable[..., Job], capfd: pytest.CaptureFixture[str]) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4712"}
    even, leaking = start("10", RANK="0", **job), start("10**9", RANK="1", **job)
    assert ranks_of(leaking.pid) == [even.pid, leaking.pid]
    first, _ = _followed(even, 0, censuses=1)
    second, now = _followed(leaking, 1)
    report = attaching._report([first, second], 2, now)
    assert report.verdict == "leak"
    assert [(found.rank, found.holder) for found in report.findings if found.certainty == "proven"] == [
        (1, "__main__.history[*]")
    ]
    assert (report.ranks.seen, report.ranks.of) == (2, 2)
    assert report.judged["cpu"].detection_limit is None  # for the rank that grows has none
    assert main(["attach", str(even.pid), "--all-ranks", "--for", "1s"]) == 0
    text = capfd.readouterr().out
    assert "2 ranks" in text


def test_a_job_that_listens_takes_its_censuses_itself(
    start: Callable[..., Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refused(pid: int) -> JobReader:
        raise ForbiddenError(f"process {pid} may not be read")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(attaching, "JobReader", refused)
    job = start("10**9", "from memtriage.session.remote.armed import arm\narm()\n")
    attached, now = Attached(job.pid), 0.0
    for _ in range(_CENSUSES):
        for _ in range(_READINGS):
            _train(job)
            now += _SECONDS / _READINGS
            attached.read_counters(now)
        census = attaching._asked(attached)
        assert census is not None
        attached.add(census, now)
    findings, judged = attached.judgment(now)
    assert verdict(findings, False, judged) == "leak"
    assert (findings[0].certainty, findings[0].holder) == ("proven", "__main__.history[*]")
    assert main(["attach", str(job.pid), "--for", "1s"]) == 0
    assert "it listens" in capfd.readouterr().out
    assert main(["attach", str(start("10").pid), "--for", "1s"]) == 2
    assert "may not be read" in capfd.readouterr().err


def test_a_job_that_takes_its_censuses_itself_is_asked_less_often() -> None:
    between = attaching._until_next
    assert between(180.0, took=2.0, paused=0.0) == 10  # 18 in the whole time
    assert between(18.0, took=2.0, paused=0.0) == 4  # half of a processor's time
    assert between(18.0, took=1.0, paused=1.0) == 20  # a twentieth of the job's


def test_the_shortest_time_has_one_census(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    said: list[str] = []
    monkeypatch.setattr(Attached, "open", lambda self: None)
    monkeypatch.setattr(Attached, "resident", 2 << 30)
    monkeypatch.setattr(Attached, "read_counters", lambda self, now: None)
    monkeypatch.setattr(attaching, "_read", lambda job, *times: read.append(job.pid))
    with pytest.raises(OutsideError, match="gave no census"):
        attaching.attach([os.getpid()], 0.0, said.append)
    assert read == [os.getpid()]
    assert said == [attaching._needed(os.getpid(), 2 << 30)]


def test_too_few_readings_are_not_judged(start: Callable[[str], Job]) -> None:
    attached = Attached(start("10").pid)
    attached.read_counters(0.0)
    assert "attach for a longer time" in (attached.judgment(0.0)[1]["cpu"].reason or "")


def test_the_memory_of_a_gpu_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def sizes(pid: int, visible: str | None) -> dict[str, int]:
        asked.update(pid=pid, visible=visible)
        return {"cuda:0": 1000}

    monkeypatch.setattr(attaching, "process_memory", sizes)
    rows = Attached(os.getpid()).ledger()["cuda:0"]
    assert [(row.row, row.bytes) for row in rows] == [("rest of the process", 1000)]
    assert asked == {"pid": os.getpid(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}


def test_the_command_reports_a_job(start: Callable[[str], Job], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["attach", str(start("10").pid), "--for", "1s"]) == 0
    printed = capfd.readouterr()
    assert "NOT JUDGED" in printed.out and "steps are not seen there" in printed.out
    assert re.fullmatch(
        r"memtriage attach: process \d+ has .* MiB: growth of 2.0 MiB per second shows within 20 s\n",
        printed.err,
    )


def test_counters_are_read_on_time_while_a_census_takes_long(
    start: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A census waits until the counters were read twenty times."""
    read_again, counted = JobReader.read_again, threading.Semaphore(0)
    read_counters = Attached.read_counters

    def count(self: Attached, now: float) -> None:
        read_counters(self, now)
        counted.release()

    def wait(self: JobReader, before: RemoteReading, **options: Any) -> RemoteReading:
        for _ in range(20):
            assert counted.acquire(timeout=60)
        return read_again(self, before, **options)

    monkeypatch.setattr(attaching, "POLICY", replace(attaching.POLICY, between_s=0.001))
    monkeypatch.setattr(Attached, "read_counters", count)
    monkeypatch.setattr(JobReader, "read_again", wait)
    report, _ = attaching.attach([start("10").pid], 0.01)
    assert report.judged["cpu"].points >= 20


@pytest.mark.parametrize(("resident", "rate", "needed"), [(1, 2, 20), (2048, 2, 20), (24 * 1024, 4, 60)])
def test_how_long_is_needed(resident: int, rate: int, needed: int) -> None:
    text = attaching._needed(4711, resident << 20)
    assert text.endswith(f"growth of {rate}.{1 if rate == 4 else 0} MiB per second shows within {needed} s")


def test_a_limit_above_what_must_show_is_no_judgment() -> None:
    attached, chance = Attached(os.getpid()), random.Random(0)
    for reading in range(100):
        attached.seconds.read(reading / 5, {"cpu": (500 << 20) + chance.randrange(40 << 20)})
    judged = attached.judgment(20.0)[1]["cpu"]
    assert judged.detection_limit is None
    assert re.fullmatch(
        r"growth of 2.0 MiB per second may not show in 19 s: use --for \d+s", judged.reason or ""
    )


def test_a_census_of_all_that_takes_too_long_is_given_up(
    start: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = Attached(start("10").pid)
    monkeypatch.setattr(attaching, "POLICY", replace(attaching.POLICY, first=1, longer=0.0))
    attached.read(0.0)
    kept = attached.reading
    with monkeypatch.context() as late:
        late.setattr(JobReader, "_deadline", lambda self, within_s=0.0: lambda: True)
        attached.read(0.0)
    assert attached.reading is kept and attached.censuses == 1
    attached.next_whole = 0.0
    attached.read(0.0)
    assert attached.reading is not kept and attached.censuses == 2


def _census(second: int, *, whole: bool, without: str = "") -> OutsideCensus:
    """What a program's own list and a library's cache keep, which grow by 1 and 2 MiB per second."""

    def group(module: str, name: str, nbytes: int) -> HolderGroup:
        path = of_module(module, name)
        return HolderGroup(
            device="cpu", anchor=path, path=path, count=nbytes >> 20, nbytes=nbytes, by_path={path: nbytes},
            owners={"variable": nbytes}, attached=False, holders={len(name): nbytes},
            witnesses=frozenset(range(nbytes >> 20)),
        )  # fmt: skip

    found = [("train", "kept", second + 1 << 20), *([("torch.library", "cache", second + 1 << 21)] * whole)]
    groups = [group(*each) for each in found if each[1] != without]
    return OutsideCensus(
        groups=groups, storages=[], details={}, at=0.0, objects=1, nodes=0, moved=0,
        seconds=0.0, stopped_s=0.0, missing=[], notes=[],
    )  # fmt: skip


def _by_censuses(last: int, without: str = "") -> dict[str | None, Any]:
    """Growth in censuses of which each second one is of the program alone; the last ones lack a holder."""
    attached = Attached(os.getpid())
    for second in range(last + 1):
        whole, here = second % 2 == 0, without if second > 8 else ""
        attached.add(_census(second, whole=whole, without=here), float(second), program_only=not whole)
    return {finding.holder: finding.certainty for finding in attached.judgment(float(last))[0]}


def test_what_only_libraries_hold_is_followed_from_one_whole_census_to_the_next() -> None:
    assert _by_censuses(8) == {"train.kept": "proven", "torch.library.cache": "proven"}


@pytest.mark.parametrize("without", ["", "kept"])
def test_a_census_of_the_program_shows_what_the_program_has_released(without: str) -> None:
    known = {"torch.library.cache": "proven"}  # of which that census says nothing
    assert _by_censuses(9, without) == (known if without else known | {"train.kept": "proven"})


def test_a_census_of_all_shows_what_libraries_have_released() -> None:
    assert _by_censuses(10, "cache") == {"train.kept": "proven"}


def test_a_job_that_ends_meanwhile_is_judged_by_what_was_read(start: Callable[[str], Job]) -> None:
    job = start("10")
    attached = Attached(job.pid)
    job.kill()
    job.wait()
    attached.read_counters(0.0)
    assert attached.ended == f"process {job.pid} ended"
