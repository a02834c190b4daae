"""Copies of a process: they do their work, and nothing of the program notices them."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from memtriage.observe.host import host_sample
from memtriage.observe.process_tree import descendants
from memtriage.process import copies
from memtriage.process.copies import Copy, living, work_in_copy

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info[:2] not in copies._REQUEST,
    reason="no copies are made here",
)


@pytest.fixture(autouse=True)
def none_was_lost(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(copies, "_lost", 0)
    yield
    assert not living()


def copy_of(work: object) -> Copy:
    made = work_in_copy(work)  # type: ignore[arg-type]
    assert made is not None
    return made


def result_of(work: object) -> bytes | None:
    return copy_of(work).result(60)


def test_a_copy_sees_the_program_as_it_was() -> None:
    values = [1]

    def work() -> bytes:
        values.append(2)
        return str(values).encode()

    copy = copy_of(work)
    values.append(3)
    assert copy.result(60) == b"[1, 2]"
    assert values == [1, 3]


def test_large_results_come_whole() -> None:
    assert result_of(lambda: bytes(range(256)) * 40_000) == bytes(range(256)) * 40_000


def test_a_copy_has_neither_collector_nor_descriptors_nor_signals_of_the_program() -> None:
    ours, theirs = os.pipe()
    try:

        def work() -> bytes:
            number = len(os.listdir("/proc/self/fd"))  # its result, and the list of the folder
            blocked = set(signal.valid_signals()) - signal.pthread_sigmask(signal.SIG_BLOCK, [])
            return repr((gc.isenabled(), number, blocked - {signal.SIGKILL, signal.SIGSTOP})).encode()

        before = signal.pthread_sigmask(signal.SIG_BLOCK, []), gc.isenabled()
        assert result_of(work) == repr((False, 2, set())).encode()
        assert (signal.pthread_sigmask(signal.SIG_BLOCK, []), gc.isenabled()) == before
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_program_is_not_told() -> None:
    told: list[str] = []
    before = signal.signal(signal.SIGCHLD, lambda *_: told.append("SIGCHLD"))
    try:
        for name in ("before", "after_in_parent", "after_in_child"):
            os.register_at_fork(**{name: lambda name=name: told.append(name)})
        assert result_of(lambda: repr(told).encode()) == b"[]"
        copy = copy_of(lambda: signal.pause() or b"")
        with pytest.raises(ChildProcessError):
            os.waitid(os.P_PID, copy.pid, os.WEXITED | os.WNOHANG)  # as if there were no such child
        assert copy.pid in living() and copy.pid not in descendants(os.getpid())
        assert (host_sample().pss, host_sample().uss) == (None, None)
        copy.result(0)
        assert told == []
        assert host_sample().pss is not None
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_nothing_is_left_of_copies_that_fail_or_are_late() -> None:
    open_before = sorted(os.listdir("/proc/self/fd"))
    failed, *late = copy_of(lambda: b"" + 1), *(copy_of(lambda: signal.pause() or b"") for _ in range(2))  # type: ignore[operator]
    assert failed.result(60) is None
    assert [each.result(0.05) for each in late] == [None, None]
    assert sorted(os.listdir("/proc/self/fd")) == open_before
    assert not any(Path(f"/proc/{each.pid}").exists() for each in (failed, *late))
    assert work_in_copy(lambda: b"") is None, "after two lost copies no more are made"


def test_work_that_fails_is_no_lost_copy() -> None:
    assert [result_of(lambda: b"" + 1) for _ in range(3)] == [None] * 3  # type: ignore[operator]
    assert result_of(lambda: b"done") == b"done"


def test_files_that_get_the_descriptors_of_a_copy_are_not_closed(tmp_path: Path) -> None:
    open_before = set(os.listdir("/proc/self/fd"))
    copy = copy_of(lambda: b"done")
    (number,) = (int(name) for name in set(os.listdir("/proc/self/fd")) - open_before if int(name) > 2)
    os.close(number)
    with (tmp_path / "file").open("w") as file:
        os.dup2(file.fileno(), number)
    assert copy.result(60) is None
    os.write(number, b"written")
    os.close(number)
    assert (tmp_path / "file").read_text() == "written"


def test_a_copy_that_waits_for_what_never_comes_is_given_up() -> None:
    lock = threading.Lock()
    with lock:
        assert copy_of(lambda: str(lock.acquire()).encode()).result(3600) is None


def test_none_where_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    open_before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(copies, "_CLONE", dict.fromkeys(copies._CLONE, 1 << 20))  # there is no such call
    assert work_in_copy(lambda: b"") is None
    assert sorted(os.listdir("/proc/self/fd")) == open_before


def test_threads_that_want_the_interpreter_do_not_stop_a_copy() -> None:
    ends = threading.Event()

    def spin() -> None:
        while not ends.is_set():
            sum(range(100))

    threads = [threading.Thread(target=spin) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):  # gives the interpreter away, and takes it again
            assert result_of(lambda: Path("/proc/self/comm").read_bytes() * sum(range(3))) is not None
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_a_forked_child_of_the_program_does_not_keep_it() -> None:
    copy = copy_of(lambda: signal.pause() or b"")
    pid = os.fork()
    if not pid:
        os._exit(len(living()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    copy.result(0)


PROGRAM = """
import os, signal, sys, time
from memtriage.process.copies import work_in_copy

def work():
    while True:
        signal.pause()

signal.signal(signal.SIGTERM, lambda *_: print("handler in", os.getpid(), flush=True))
copy = work_in_copy(work)
print(os.getpid(), copy.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def program() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program whose copy is at work, and that copy's process."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline().split()[1])
        process.kill()


def test_it_ends_with_the_program(program: tuple[subprocess.Popen[str], int]) -> None:
    process, copy = program
    number, ends = os.pidfd_open(copy), select.poll()
    ends.register(number, select.POLLIN)
    assert not ends.poll(0)
    process.kill()
    process.wait()
    assert ends.poll(60_000)
    os.close(number)


def _lives(pid: int) -> bool:
    """Whether a process runs; an orphan that nobody waits for may stay as a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_signals_to_the_group_run_no_handler_in_it(program: tuple[subprocess.Popen[str], int]) -> None:
    process, copy = program
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == f"handler in {process.pid}\n"
    assert _lives(copy)
    process.kill()
    assert process.stdout.read() == ""
