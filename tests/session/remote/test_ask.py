"""Asking processes for a census: which of them listen, and what is said of those that do not answer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from memtriage.model.asked import Answer
from memtriage.session.remote import ask as client
from memtriage.session.remote.ask import AskError, ask, ask_all, listening
from support.listening import Start, answering


def test_an_answer_that_does_not_come_in_time(start: Start) -> None:
    asked, release = threading.Event(), threading.Event()

    def slow(within_s: float, follow: bool) -> Answer:
        asked.set()
        release.wait()
        return answering(within_s, follow)

    start(slow)
    with pytest.raises(AskError, match=r"did not answer within 50 ms"):
        ask(os.getpid(), 0.05)
    assert asked.wait(60.0)
    release.set()


def test_several_are_asked_and_each_is_told() -> None:
    def one(pid: int, timeout_s: float) -> Answer:
        if pid == 3:
            raise AskError("process 3 ended before it answered")
        if pid == 4:
            return Answer(pid=pid, refused="its watch has ended")
        return Answer(pid=99, rank=10 - pid)

    answers, failed = ask_all([1, 2, 3, 4], 1.0, one)
    assert [(answer.pid, answer.rank) for answer in answers] == [(2, 8), (1, 9)]
    assert [(each.pid, each.why) for each in failed] == [
        (3, "process 3 ended before it answered"),
        (4, "process 4 gave no census: its watch has ended"),
    ]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process below this one, as a rank is below its launcher."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_those_that_listen_of_a_process_and_its_descendants(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    listens = {os.getpid(), child.pid}
    monkeypatch.setattr(client, "socket_of", lambda pid: Path("x") if pid in listens else None)
    assert listening(os.getpid()) == [os.getpid(), child.pid]
    assert listening(child.pid) == [child.pid]
    listens.remove(os.getpid())
    assert listening(os.getpid()) == [child.pid]
    listens.clear()
    assert listening(os.getpid()) == []


@pytest.mark.parametrize("pid", [-1, 2**22 + 1])
def test_there_is_no_such_process(pid: int) -> None:
    with pytest.raises(AskError, match=f"^there is no process {pid}$"):
        listening(pid)


def test_only_its_own_user_and_root_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    own = psutil.Process().uids().effective
    monkeypatch.setattr(client, "socket_of", lambda pid: Path("x"))
    for user, may_ask in ((own, True), (0, True), (own + 1, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        if may_ask:
            assert listening(os.getpid())[0] == os.getpid()
        else:
            with pytest.raises(AskError, match=" belongs to another user; only its own user, and "):
                listening(os.getpid())


def test_a_process_that_may_not_be_read_is_another_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(process: object) -> object:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "uids", denied)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(AskError, match="belongs to another user"):
        listening(os.getpid())


def test_a_question_says_how_long_the_process_may_wait(start: Start) -> None:
    """Half of the time is for the census itself."""
    asked: list[tuple[float, bool]] = []

    def answer(within_s: float, follow: bool) -> Answer:
        asked.append((within_s, follow))
        return answering(within_s, follow)

    start(answer)
    ask(os.getpid(), 20.0)
    ask(os.getpid(), 30.0, follow=True)
    assert asked == [(10.0, False), (15.0, True)]


def test_a_long_answer_is_read_whole(start: Start) -> None:
    start(lambda within_s, follow: Answer(pid=1, argv=["x" * 1_000_000]))
    assert ask(os.getpid(), 20.0).argv == ["x" * 1_000_000]


def test_what_is_no_answer_breaks_off(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(answering)
    monkeypatch.setattr(client, "read_line", lambda connection, longest: b"what?")
    with pytest.raises(AskError, match=rf"^process {os.getpid()} broke off \(JSON is malformed"):
        ask(os.getpid(), 20.0)


@pytest.mark.parametrize(("user", "is_own"), [(0, True), (os.geteuid(), True), (4711, False), (-1, False)])
def test_root_and_the_process_s_own_user_may_listen(
    start: Start, monkeypatch: pytest.MonkeyPatch, user: int, is_own: bool
) -> None:
    """The socket of a rank that runs as another user than who asks, as root may."""
    start(answering)
    monkeypatch.setattr(client, "peer", lambda connection: (1, user, 1))
    if is_own:
        assert ask(os.getpid(), 20.0).step == 7
    else:
        with pytest.raises(AskError, match="is another user's socket, not that of process"):
            ask(os.getpid(), 20.0)


def test_a_process_that_has_ended_is_told_from_one_that_does_not_listen(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AskError, match=f"^process {child.pid} does not listen$"):
        ask(child.pid, 5.0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    with pytest.raises(AskError, match=f"^process {child.pid} ended before it answered$"):
        ask(child.pid, 5.0)
    monkeypatch.setattr(client, "socket_of", lambda pid: Path("/nonexistent"))
    with pytest.raises(AskError, match=f"^process {child.pid} ended before it answered$"):
        ask(child.pid, 5.0)


def test_ranks_come_in_order_and_those_without_one_by_process() -> None:
    answers, failed = ask_all([], 1.0)
    assert (answers, failed) == ([], [])
    ranks = {7: 1, 8: 0, 9: None, 3: None}
    answers, _ = ask_all([7, 8, 9, 3], 1.0, lambda pid, timeout_s: Answer(pid=0, rank=ranks[pid]))
    assert [answer.pid for answer in answers] == [3, 8, 9, 7]


def test_all_are_asked_at_the_same_time() -> None:
    """Each waits until all have been asked."""
    together = threading.Barrier(32, timeout=60.0)

    def one(pid: int, timeout_s: float) -> Answer:
        together.wait()
        return Answer(pid=pid)

    assert len(ask_all(range(32), 1.0, one)[0]) == 32
