"""A trial's processes: all of them are gone when it has ended, however it did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from memtriage.prove.processes import kill_leftovers, run

# A process in a session of its own, as torchrun's workers are; its id is the job's output.
_ORPHAN = "setsid sleep 600 & echo $!; "


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "MEMTRIAGE_TRIAL": str(folder)}


def orphan(log: Path) -> int:
    """The process id that the job printed."""
    return int(log.read_text().split()[0])


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_output_and_status(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    ended = run(command, env=environment(tmp_path), directory=tmp_path, log=log, timeout_s=None)
    assert (ended.exit_code, ended.timed_out) == (3, False)
    assert ended.seconds > 0
    assert sorted(log.read_text().split()) == ["err", "out"]


def test_a_signal_is_a_negative_status(tmp_path: Path) -> None:
    command = ["sh", "-c", "kill -KILL $$"]
    ended = run(command, env=environment(tmp_path), directory=tmp_path, log=tmp_path / "log", timeout_s=60)
    assert ended.exit_code == -signal.SIGKILL


def test_nothing_is_left_behind_by_a_job_that_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", _ORPHAN]
    run(command, env=environment(tmp_path), directory=tmp_path, log=log, timeout_s=None)
    assert not runs(orphan(log))


def test_a_job_out_of_time_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", _ORPHAN + "sleep 600"]
    ended = run(command, env=environment(tmp_path), directory=tmp_path, log=log, timeout_s=0.5)
    assert ended.timed_out
    assert not runs(orphan(log))


@pytest.fixture
def usual_interrupt() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, whatever a library of an earlier test has put there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_stops_it_too(tmp_path: Path, usual_interrupt: None) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", _ORPHAN + "kill -INT $PPID; sleep 600"]
    with pytest.raises(KeyboardInterrupt):
        run(command, env=environment(tmp_path), directory=tmp_path, log=log, timeout_s=None)
    assert not runs(orphan(log))


def waiting(env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that has begun, and waits for ever."""
    process = subprocess.Popen(
        ["sh", "-c", "echo begun; read forever"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    return process


def test_what_a_killed_runner_left_is_found(tmp_path: Path) -> None:
    inside, outside = tmp_path / "out" / "a" / "round-000", tmp_path / "outer"
    left, other = (waiting(environment(folder)) for folder in (inside, outside))
    try:
        assert kill_leftovers(tmp_path / "out") == 1
        assert not runs(left.pid)
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.communicate()


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        run(["/no/such"], env=environment(tmp_path), directory=tmp_path, log=tmp_path / "log", timeout_s=1)
