"""Which processes of a node are the ranks of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from memtriage.session.job_ranks import environment_of, rank_of, ranks_of
from support.jobs import job_of, next_line

_WAITS = "print(1, flush=True); input()"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Starts a process that waits, with these variables."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    jobs = []

    def begin(**variables: str) -> int:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        job = subprocess.Popen([sys.executable, "-c", _WAITS], env={**os.environ, **variables}, **pipes)
        jobs.append(job)
        assert job.stdout is not None and job.stdout.readline()
        return job.pid

    yield begin
    for job in jobs:
        job.kill()
        job.communicate()


def test_a_process_without_a_number_has_no_rank(start: Callable[..., int]) -> None:
    assert [rank_of(start(RANK=rank)) for rank in ("12", "", "master", "-1")] == [12, None, None, None]
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert (rank_of(gone.pid), environment_of(gone.pid)) == (None, {})


def test_ranks_of_another_job_do_not_count(start: Callable[..., int]) -> None:
    job = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4713"}
    two, zero, one = (start(RANK=rank, **job) for rank in ("2", "0", "1"))
    start(RANK="0", **{**job, "MASTER_PORT": "4714"})
    start(RANK="0", **{**job, "WORLD_SIZE": "2"})
    start(RANK="0", **job, TORCHELASTIC_RUN_ID="another")
    alone = start()
    assert ranks_of(one) == ranks_of(zero) == [zero, one, two]
    assert ranks_of(alone) == [alone]


def test_workers_of_a_rank_are_none(start: Callable[..., int]) -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_WAITS!r}])"
    job = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "4715"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=job, **pipes) as rank:
        assert rank.stdout is not None and rank.stdout.readline()  # its worker's
        assert ranks_of(rank.pid) == [rank.pid]
        rank.communicate(b"\n")


def test_ranks_are_found_from_their_launcher_and_from_one_of_them() -> None:
    wait = "input()"
    launch = (
        "import os, subprocess, sys\n"
        "jobs = [subprocess.Popen([sys.executable, '-c', 'print(1, flush=True); input()'],\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE,\n"
        "    env=os.environ | {'RANK': str(rank), 'WORLD_SIZE': '2', 'MASTER_PORT': '4711'})\n"
        "    for rank in (1, 0)]\n"
        "[job.stdout.readline() for job in jobs]\n"
        "print(*(job.pid for job in jobs), flush=True)\n"
        f"{wait}\n"
        "[job.kill() for job in jobs]\n"
    )
    with job_of(launch, says="") as launcher:
        one, zero = (int(pid) for pid in next_line(launcher).split())
        assert ranks_of(launcher.pid) == [zero, one]
        assert ranks_of(one) == [zero, one]
        launcher.communicate("\n")
    assert ranks_of(os.getpid()) == [os.getpid()]
