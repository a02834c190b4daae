"""Who may ask a watched process, and what others do at its socket or in its directory."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from memtriage.model.asked import Answer
from memtriage.session.remote import listen
from memtriage.session.remote.listen import Listener
from memtriage.session.remote.socket_path import PlaceError, place


def answering(within_s: float, follow: bool) -> Answer:
    return Answer(pid=os.getpid())


def test_a_symlink_in_place_of_its_directory_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with tempfile.TemporaryDirectory() as runtime:  # a short path: that of a socket is limited
        Path(runtime, "memtriage").symlink_to(target)
        with pytest.raises(PlaceError, match="is not a directory"):
            place({"XDG_RUNTIME_DIR": runtime}, tmp_path / "nowhere")
    assert list(target.iterdir()) == []


def test_a_symlink_in_place_of_its_socket_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    victim.chmod(0o644)
    name = place() / listen.name_of(os.getpid())
    name.symlink_to(victim)
    listener = Listener(answering)
    listener.start()
    assert name.is_socket()
    listener.stop()
    assert (victim.read_text(), victim.stat().st_mode & 0o777) == ("untouched", 0o644)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    listener = Listener(answering)
    listener.start()
    assert listener.path is not None
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as other:
            try:
                other.connect(str(listener.path))
            except PermissionError:
                os._exit(13)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
    listener.stop()


def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    listener = Listener(answering)
    listener.start()
    assert listener.path is not None and listener.path.exists()
    listener.stop()
    assert list(tmp_path.iterdir()) == []
