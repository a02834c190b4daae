"""The processes below the program, followed by role."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import pytest

from memtriage.diagnose.growth.evidence import Evidence
from memtriage.diagnose.growth.judgment import judge
from memtriage.diagnose.growth.roles import LIVING, SEGMENTS
from memtriage.model.evidence import CensusSeen, EvidenceLine
from memtriage.model.position import TrainingPosition
from memtriage.observe.host import ChildSample, HostSample, ShmUse
from memtriage.observe.loaders import Epoch
from memtriage.session import job_watch
from memtriage.session.job_watch import POLICY, JobWatch
from memtriage.session.outside_reader import OutsideReader, ReadReply, ReadRequest

MIB = 1 << 20


class Asked:
    """A reader that only notes what is asked for, and answers what the test says."""

    def __init__(self) -> None:
        self.requests: list[ReadRequest] = []
        self.answers: list[ReadReply] = []
        self.started = False

    def start(self) -> None:
        self.started = True

    def ask(self, request: ReadRequest) -> str | None:
        self.requests.append(request)
        return None

    def replies(self) -> list[ReadReply]:
        answers, self.answers = self.answers, []
        return answers

    def stop(self) -> None:
        pass


class Job:
    """A watch whose clock the test moves, with children that grow when they are told."""

    def __init__(self, children: ExitStack) -> None:
        self.position = TrainingPosition()
        self.lines: list[EvidenceLine] = []
        self.evidence = Evidence()
        self.reader = Asked()
        self.watch = JobWatch(
            self.evidence,
            lambda: self.position,
            None,
            self.lines.append,
            _reader=cast(OutsideReader, self.reader),
        )
        self._children = children

    def child(self, before: str = "") -> subprocess.Popen[str]:
        code = "kept = []\nfor size in map(int, iter(input, '')): kept.append(b'x' * size); print(flush=True)"
        code = "print(flush=True)\n" + before + code
        process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
        self._children.callback(process.wait)
        self._children.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()  # what an interpreter takes while it starts is none of the test's growth
        return process

    def wakes(self, seconds: float, step: int) -> None:
        self.position = TrainingPosition(time_s=seconds, step=step)
        self.watch.at_wake()


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as children:
        yield Job(children)


def grow(process: subprocess.Popen[str], size: int) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{size}\n")
    process.stdin.flush()
    process.stdout.readline()


def as_workers(job: Job, *processes: subprocess.Popen[str]) -> None:
    class Pass:
        name = "loader"
        workers = [process.pid for process in processes]

    job.watch.passes(cast(Epoch, Pass))


def test_workers_have_a_role_that_the_next_epochs_workers_take_over(job: Job) -> None:
    first = job.child()
    as_workers(job, first)
    job.wakes(1, 1)
    job.wakes(2, 2)
    first.kill()
    first.wait()
    second = job.child()
    as_workers(job, second)
    job.wakes(3, 3)
    job.wakes(4, 4)
    role = job.evidence.roles["worker 0 of loader"]
    assert role.role is not None and role.role.processes == 2 and role.role.where == "worker"
    assert role.run["step"].tracks["cpu"].readings == 2


def test_a_process_that_ended_before_its_size_was_read_is_not_read(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = job.child()
    as_workers(job, worker)
    monkeypatch.setattr(job_watch, "sizes_of", lambda pid: None)
    for second in (1, 10):
        job.wakes(second, second)
    assert list(job.evidence.roles) == ["worker 0 of loader"] and not job.reader.requests


def test_a_process_is_named_once_it_has_become_what_it_will_be(job: Job) -> None:
    process = job.child()
    job.wakes(1, 1)
    assert not job.evidence.roles
    job.wakes(1 + 2 * POLICY.settles_s, 2)
    (role,) = job.evidence.roles
    folder, name = sys.executable.split("/")[-2:]
    assert role.startswith(f"{folder}/{name} -c ") and process.poll() is None


_LOADS = """
import os, sys
if not os.fork():
    open("/proc/self/comm", "w").write("pt_data_worker")
    print(flush=True)
"""


def test_a_worker_of_another_process_is_named_by_it(job: Job) -> None:
    """No loader of this program names it."""
    rank = job.child(_LOADS)
    assert rank.stdout is not None and rank.stdout.readline() == "\n"
    job.wakes(1, 1)
    job.wakes(1 + 2 * POLICY.settles_s, 2)
    own, worker = job.evidence.roles.values()
    assert own.role is not None and worker.role is not None
    assert worker.role.role == f"worker 0 of {own.role.role}"
    assert worker.role.group == f"workers of {own.role.group}"


@pytest.mark.parametrize("command", [(sys.executable, "-c", "input()"), ("cat",)])
def test_the_reading_process_begins_with_the_first_child_that_runs_python(
    job: Job, command: Sequence[str]
) -> None:
    with subprocess.Popen(command, stdin=-1) as process:
        job.wakes(1, 1)
        job.wakes(2, 2)
        assert job.evidence.roles
        assert job.reader.started is (command[0] == sys.executable)
        assert process.stdin is not None
        process.stdin.close()


def test_what_grows_is_read_and_what_was_read_is_evidence(job: Job) -> None:
    process, flat = job.child(), job.child()
    as_workers(job, process, flat)
    for step in range(1, 16):
        job.wakes(step, step)
        grow(process, 2 * MIB)
    assert {request.pid for request in job.reader.requests} == {process.pid}
    count = len(job.reader.requests)
    job.reader.answers = [
        ReadReply(process.pid, at, took_s=0.1, census=CensusSeen(position=TrainingPosition(), partial=True))
        for at, position in list(job.watch._positions)[-1:]
    ]
    job.wakes(17, 17)
    (census,) = job.evidence.roles["worker 0 of loader"].run["step"].censuses
    assert census.position.step == 15 and census.role == "worker 0 of loader"
    assert job.lines == [census]
    job.wakes(30, 30)
    assert len(job.reader.requests) == count + 1


def test_of_processes_that_do_the_same_the_one_that_still_grows_is_read(job: Job) -> None:
    starts, leaks = job.child(), job.child()
    as_workers(job, starts, leaks)
    for step in range(1, 80):
        job.wakes(step, step)
        if step <= 12:
            grow(starts, 2 * MIB)
        if step > 6:
            grow(leaks, 2 * MIB)
        for request in job.reader.requests[-1:]:
            job.reader.answers = [ReadReply(request.pid, float(step), took_s=0.1)]
    asked = [request.pid for request in job.reader.requests]
    assert asked == sorted(asked, key=[starts.pid, leaks.pid].index)
    assert set(asked) == {starts.pid, leaks.pid}


def test_a_process_that_cannot_be_read_says_why_and_is_not_asked_for_again(job: Job) -> None:
    process = job.child()
    as_workers(job, process)
    for step in range(1, 16):
        job.wakes(step, step)
        grow(process, 2 * MIB)
    asked = len(job.reader.requests)
    job.reader.answers = [ReadReply(process.pid, 0.0, took_s=0.5, error="not this one")]
    for step in range(20, 25):
        job.wakes(step, step)
    role = job.evidence.roles["worker 0 of loader"].role
    assert role is not None and role.unread == "not this one"
    assert len(job.reader.requests) == asked == 1


def test_a_process_that_ended_before_it_was_read_leaves_the_reading_to_its_successor(job: Job) -> None:
    first = job.child()
    as_workers(job, first)
    for step in range(1, 16):
        job.wakes(step, step)
        grow(first, 2 * MIB)
    first.kill()
    first.wait()
    second = job.child()
    as_workers(job, second)
    job.reader.answers = [ReadReply(first.pid, 0.0, took_s=0.5)]
    for step in range(16, 22):
        job.wakes(step, step)
    role = job.evidence.roles["worker 0 of loader"].role
    assert role is not None and role.unread is None
    assert [request.pid for request in job.reader.requests] == [first.pid, second.pid]


def test_the_jobs_ledger_is_that_of_the_last_moment_with_children(job: Job) -> None:
    process = job.child()
    as_workers(job, process)
    job.wakes(1, 1)
    job.wakes(2, 2)
    below = ChildSample(pid=process.pid, name="python", rss=9, pss=7, uss=5)
    job.watch.at_sample(HostSample(rss=3, pss=2, uss=1), [below], None)
    job.watch.at_sample(HostSample(rss=3, pss=2, uss=1), [], None)
    ledger: Any = job.watch.ledger
    assert ledger.step == 2 and ledger.total == 9
    assert "workers of loader: pages of its own" in [row.row for row in ledger.rows]


def test_a_program_that_only_waits_is_followed_itself(job: Job) -> None:
    job.child()
    job.position = TrainingPosition(time_s=1.0)
    job.watch.at_wake()
    assert job.evidence.roles["this process"].role is not None
    assert os.getpid() not in job.watch._processes


def test_segments_that_wait_in_dev_shm_are_a_role_of_their_own(job: Job) -> None:
    """As tensors do that were sent through a queue: this process has them open, and none has mapped them."""
    as_workers(job, job.child())
    job.wakes(1, 1)
    with tempfile.TemporaryFile(dir="/dev/shm") as segment:
        for step in range(2, 12):
            segment.write(bytes(2 * MIB))
            segment.flush()
            job.wakes(step, step)
    points = job.evidence.roles[SEGMENTS].run["second"].tracks["cpu"].points()
    assert set(np.diff(points.floors).tolist()) == {2 * MIB}


def test_an_empty_dev_shm_is_what_its_use_is_compared_with(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter((0, 2 * POLICY.rises))
    monkeypatch.setattr(job_watch, "dev_shm", lambda: ShmUse(total=1 << 30, used=next(used)))
    as_workers(job, job.child())
    job.wakes(1, 1)
    assert SEGMENTS not in job.evidence.roles
    job.wakes(2, 2)
    assert SEGMENTS in job.evidence.roles


def pile_up(job: Job, kept: bool) -> Evidence:
    """Two processes of 40 MiB each are started every fifth step; earlier ones end where they are not kept."""
    living: list[subprocess.Popen[bytes]] = []
    for step in range(1, 101):
        if step % 5 == 0:
            for process in [] if kept else living:
                process.kill()
                process.wait()
            living = [*(living if kept else []), *(subprocess.Popen(["sleep", "100"]) for _ in range(2))]
        job.wakes(step, step)
        if step % 10 == 9:
            below = [ChildSample(pid=each.pid, name="sleep", rss=9, uss=40 * MIB) for each in living]
            job.watch.at_sample(HostSample(rss=1, pss=1, uss=1), below, None)
    for process in living:  # the program has made its last step
        process.kill()
        process.wait()
        job.wakes(100.5, 100)
    job.evidence.situation.position = job.position
    return job.evidence


def test_processes_that_pile_up_are_a_leak_of_what_each_has_for_itself(job: Job) -> None:
    (leak,) = judge(pile_up(job, kept=True)).leaks
    assert (leak.certainty, leak.process, leak.cause) == ("proven", LIVING, "processes")
    assert leak.rates["step"] == pytest.approx(2 * 40 * MIB / 5, rel=0.1)
    assert leak.unread is not None and "of them" in leak.unread and "40.0 MiB" in leak.unread


def test_processes_that_follow_one_another_are_none(job: Job) -> None:
    assert judge(pile_up(job, kept=False)).leaks == []
