"""A job that is stopped for a moment always goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from memtriage.outside import pause
from memtriage.outside.memory import GoneError, ProcessMemory
from memtriage.outside.pause import Stop, paused
from support.jobs import job_of, told

_JOB = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""
_KILLED_READER = """
import os, signal, sys
from memtriage.outside.pause import paused
with paused(int(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def job() -> Iterator[subprocess.Popen[str]]:
    with job_of(_JOB) as process:
        yield process


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def _goes_on(job: subprocess.Popen[str]) -> bool:
    return told(job, "still here") == "still here"


def test_a_job_is_stopped_and_goes_on(job: subprocess.Popen[str]) -> None:
    memory = ProcessMemory(job.pid)
    chunk = next(mapping for mapping in memory.mappings if mapping.readable).start >> 18
    prepared = []
    with paused(job.pid, lambda: prepared.append(_state(job.pid))) as stop:
        os.waitid(os.P_PID, job.pid, os.WSTOPPED | os.WCONTINUED)  # returns only if it was stopped
        copied = stop.copy(memory, [chunk])
    assert prepared[0] not in "Tt"
    assert copied == bool(memory.bytes_read)  # on a busy machine the time may be over before
    assert stop.seconds > 0
    assert _goes_on(job)


def test_the_job_goes_on_when_the_time_is_over(job: subprocess.Popen[str]) -> None:
    with paused(job.pid) as stop:
        assert _goes_on(job)  # though this process has not ended the stop
    assert stop.seconds > 0


def test_a_stop_that_was_ended_for_the_reader_lasted_no_longer(
    job: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with paused(job.pid) as stop:
        assert _goes_on(job)
        monkeypatch.setattr(pause.time, "monotonic", lambda: 1e12)  # the reader comes back much later
    assert 0 < stop.seconds < 1e6


def test_an_error_while_it_is_stopped(job: subprocess.Popen[str]) -> None:
    with pytest.raises(ZeroDivisionError), paused(job.pid):
        _ = 1 / 0
    assert _goes_on(job)


def test_a_reader_that_is_killed_while_it_is_stopped(job: subprocess.Popen[str]) -> None:
    reader = subprocess.run([sys.executable, "-c", _KILLED_READER, str(job.pid)], check=False)
    assert reader.returncode == -signal.SIGKILL
    assert _goes_on(job)


def test_a_job_that_was_stopped_before_stays_stopped(job: subprocess.Popen[str]) -> None:
    os.kill(job.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, job.pid, os.WSTOPPED)
    with paused(job.pid):
        pass
    assert _state(job.pid) == "T"


def test_a_job_that_ends_while_it_is_stopped(job: subprocess.Popen[str]) -> None:
    with pytest.raises(GoneError), paused(job.pid):
        job.kill()
        job.wait()
    with pytest.raises(GoneError), paused(job.pid):
        pass


def test_chunks_are_copied_in_parts_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 0.3, 0.31])
    monkeypatch.setattr(pause.time, "monotonic", lambda: next(times))
    asked: list[range] = []

    class Memory:
        read_ahead = staticmethod(asked.append)

    stop = Stop(0.5)
    assert stop.copy(Memory(), range(100)) == 64  # type: ignore[arg-type]
    assert asked == [range(32), range(32, 64)]


def test_chunks_that_are_all_copied_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause.time, "monotonic", lambda: 100.0)
    asked: list[range] = []

    class Memory:
        read_ahead = staticmethod(asked.append)

    assert Stop().copy(Memory(), range(33)) == 33  # type: ignore[arg-type]
    assert asked == [range(32), range(32, 33)]


def test_the_shortest_of_two_ends_of_a_stop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause.time, "monotonic", lambda: 100.0)
    stop = Stop()
    stop.begin()
    stop.end(100.5)
    assert stop.seconds == 0.5
    stop.end(100.25)
    stop.end(100.75)
    assert stop.seconds == 0.25
