"""The listener: who is answered, what nonsense does to it, and what stays when it ends."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from memtriage.model.asked import Answer
from memtriage.process.threads import OwnThread
from memtriage.session.remote import listen
from memtriage.session.remote.ask import AskError, ask, ask_all
from memtriage.session.remote.listen import Deadline, Listener
from support.listening import Start, answering


def test_a_deadline_counts_down_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(listen.time, "monotonic", lambda: now)
    due, passed = Deadline(5.0), Deadline(-1.0)
    assert (due.left_s, due.passed_s, passed.left_s) == (5.0, 0.0, 0.0)
    now = 1003.0
    assert (due.left_s, due.passed_s) == (2.0, 3.0)
    now = 1007.0
    assert (due.left_s, due.passed_s) == (0.0, 7.0)


def test_the_socket_is_its_owners_alone_and_goes_at_the_end(start: Start) -> None:
    listener = start(answering)
    assert listener.path is not None
    assert stat.S_IMODE(listener.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(listener.path.parent.stat().st_mode) == 0o700
    listener.stop()
    listener.stop()
    assert not listener.path.exists()
    assert not listener._thread.is_alive and not listener.path.parent.exists()
    with pytest.raises(AskError, match="does not listen"):
        ask(os.getpid(), 5.0)


def test_other_users_are_not_answered(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(answering)
    monkeypatch.setattr(listen, "peer", lambda connection: (1, os.geteuid() + 1, 1))
    with pytest.raises(AskError, match="broke off"):
        ask(os.getpid(), 20.0)


@pytest.mark.parametrize("sent", [b"", b"\n", b"what?\n", b'{"within_s": "soon"}\n', b"x" * 10_000 + b"\n"])
def test_nonsense_does_no_harm(start: Start, sent: bytes) -> None:
    listener = start(answering)
    assert listener.path is not None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(listener.path))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert ask(os.getpid(), 20.0).step == 7


def test_a_census_that_fails_is_told_as_such(start: Start) -> None:
    def failing(within_s: float, follow: bool) -> Answer:
        raise RuntimeError("no heap")

    start(failing)
    answers, failed = ask_all([os.getpid()], 20.0)
    assert answers == []
    assert failed[0].why.endswith("gave no census: the census failed (RuntimeError: no heap)")


def test_an_answer_that_cannot_be_written_is_told_as_such(start: Start) -> None:
    answers = [Answer(pid=1, doing=cast(Any, object())), Answer(pid=1, argv=["no text: \udc80"])]
    start(lambda within_s, follow: answers.pop(0))
    assert "TypeError" in (ask(os.getpid(), 20.0).refused or "")
    assert ask(os.getpid(), 20.0).argv == ["no text: \\udc80"]


def test_a_failure_to_accept_passes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = socket.socket.accept, threading.Event()

    def accept(listening: socket.socket) -> object:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return real(listening)

    monkeypatch.setattr(socket.socket, "accept", accept)
    start(answering)
    assert refused.wait(60.0)
    assert ask(os.getpid(), 20.0).step == 7


def test_a_file_that_gets_the_descriptor_of_a_request_is_neither_written_nor_closed(
    start: Start, tmp_path: Path
) -> None:
    """A program may close every descriptor, and open files of its own."""
    numbers: list[int] = []

    def answer_later(within_s: float, follow: bool) -> Answer:
        numbers.append(max(int(name) for name in os.listdir("/proc/self/fd")))
        with (tmp_path / "file").open("w") as file:
            os.dup2(file.fileno(), numbers[0])
        return Answer(pid=1)

    listener = start(answer_later)
    with pytest.raises(AskError, match="broke off"):
        ask(os.getpid(), 20.0)
    listener.stop()
    os.write(numbers[0], b"written")
    os.close(numbers[0])
    assert (tmp_path / "file").read_text() == "written"


def test_where_it_cannot_listen_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise listen.PlaceError("/tmp/memtriage-0: belongs to another user")

    monkeypatch.setattr(listen, "place", refuse)
    said: list[str] = []
    listener = Listener(answering, said.append)
    listener.start()
    listener.stop()
    assert said == [
        "cannot listen (/tmp/memtriage-0: belongs to another user); the run continues, but cannot be "
        "asked for a census"
    ]


def test_without_a_thread_for_it_no_socket_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(OwnThread, "start", refuse)
    said: list[str] = []
    listener = Listener(answering, said.append)
    listener.start()
    listener.stop()
    assert said[0].startswith("cannot listen (can't start new thread)")
    assert not (tmp_path / "memtriage").exists()


def test_a_forked_child_leaves_its_parents_socket_alone(start: Start) -> None:
    listener = start(answering)
    child = os.fork()
    if child == 0:
        listener.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert listener.path is not None and listener.path.exists()
    assert ask(os.getpid(), 20.0).step == 7
