"""Whatever a program has started ends with it, and with its caller."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from memtriage.prediction.sandbox.call import TimedOut

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")

MARK = "MEMTRIAGE_TEST_PROGRAM"


def processes_of(mark: str) -> list[psutil.Process]:
    """Processes that the program with this mark in its environment has started, or that run it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            pass
    return found


@pytest.fixture
def mark(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv(MARK, str(tmp_path))
    return str(tmp_path)


DAEMON = """
    from memtriage.prediction.sandbox.child import report_progress
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.write(writing, b"x")
        while True:
            signal.pause()
    seen.append(os.read(reading, 1))
    report_progress("the daemon runs")
"""
ENDLESS = """
    os.write(2, b"running" + bytes([10]))
    signal.pause()
"""


def test_a_daemon_ends_with_the_program(level, sandboxed, mark):
    assert sandboxed(DAEMON, level=level).seen == ["b'x'"]
    assert processes_of(mark) == []


def test_a_daemon_ends_with_a_program_that_takes_too_long(level, sandboxed, mark, monkeypatch):
    seconds = 0.0
    running = []
    monkeypatch.setattr(time, "monotonic", lambda: seconds)

    def progress(text: str, since: float) -> None:
        nonlocal seconds
        if text == "the daemon runs":
            running.extend(processes_of(mark))
            seconds = 2.0

    with pytest.raises(TimedOut):
        sandboxed(DAEMON + "    signal.pause()", level=level, progress=progress, timeout_s=1)
    assert len(running) > 2
    assert processes_of(mark) == []


def test_a_daemon_ends_with_a_caller_that_is_killed(level, tmp_path, mark):
    (tmp_path / "job.py").write_text("import os, signal\ndef program():\n    seen = []" + DAEMON + ENDLESS)
    command = (
        "from memtriage.prediction.sandbox.call import call; "
        f"call('job:program', {{}}, object, wanted=[], output=2, levels=('{level}', 'python'))"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(
        [sys.executable, "-c", command], stderr=subprocess.PIPE, env=environment, cwd=tmp_path
    ) as caller:
        assert caller.stderr is not None
        assert caller.stderr.readline() == b"running\n"
        running = processes_of(mark)
        caller.kill()
    assert len(running) > 3
    assert psutil.wait_procs(running, timeout=60)[1] == []
