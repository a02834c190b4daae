"""Where a process listens: a place of its user's own, found again by its number."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from memtriage.session.remote import socket_path
from memtriage.session.remote.socket_path import (
    LONGEST_PATH,
    PlaceError,
    name_of,
    place,
    remove_stale,
    socket_of,
)


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Stands in for `/tmp`."""
    folder = tmp_path / "t"
    folder.mkdir()
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_below_the_runtime_directory(tmp_path: Path, temporary: Path) -> None:
    holding = place({"XDG_RUNTIME_DIR": str(tmp_path)}, temporary)
    assert holding == tmp_path / "memtriage" and mode(holding) == 0o700
    assert place({"XDG_RUNTIME_DIR": str(tmp_path)}, temporary) == holding


@pytest.mark.parametrize("runtime", ["", "relative", "/nonexistent/runtime", "/" + "x" * LONGEST_PATH])
def test_else_in_the_temporary_directory(temporary: Path, runtime: str) -> None:
    holding = place({"XDG_RUNTIME_DIR": runtime}, temporary)
    assert holding == temporary / f"memtriage-{os.geteuid()}" and mode(holding) == 0o700


def test_a_directory_that_others_can_enter_is_closed_to_them(temporary: Path) -> None:
    folder = temporary / f"memtriage-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    assert mode(place({}, temporary)) == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "foreign"])
def test_a_place_that_is_not_ones_own_is_refused(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = temporary / f"memtriage-{os.geteuid()}"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir()
        user = os.geteuid()
        monkeypatch.setattr(socket_path.os, "geteuid", lambda: user + 1)
        folder.rename(temporary / f"memtriage-{user + 1}")
    with pytest.raises(PlaceError, match="memtriage-"):
        place({}, temporary)


def test_sockets_that_nobody_listens_at_are_removed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as dead:
        living.bind(str(tmp_path / name_of(1)))
        living.listen(1)
        dead.bind(str(tmp_path / name_of(2)))
    # Closed with the block: nobody listens at either any more, but only now.
    with socket.socket(socket.AF_UNIX) as living:
        (tmp_path / name_of(1)).unlink()
        living.bind(str(tmp_path / name_of(1)))
        living.listen(1)
        (tmp_path / "notes.txt").touch()
        remove_stale(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(1), "notes.txt"]


def test_a_socket_is_found_by_the_number_of_its_process(tmp_path: Path) -> None:
    assert socket_of(os.getpid()) is None
    path = tmp_path / name_of(os.getpid())
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
        one.listen(1)
        assert socket_of(os.getpid()) == path
    assert socket_of(os.getpid()) is None
    assert socket_of(2**22 + 1) is None
