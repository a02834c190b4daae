"""What a process that is read from outside answers; or which right is missing, and what grants it."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from memtriage.model.asked import HeldHere
from memtriage.model.census import HolderGroup
from memtriage.outside import answer
from memtriage.outside.census import OutsideCensus
from memtriage.outside.memory import ForbiddenError, GoneError, OutsideError
from support.jobs import job_of
from support.paths import of_module

_OWNER = 1000


@pytest.mark.parametrize(
    ("user", "scope", "expected"),
    [
        (_OWNER, "1", "ptrace_scope is 1; run memtriage with sudo, or .*echo 0 . sudo tee"),
        (_OWNER, "2", "ptrace_scope is 2; run memtriage with sudo"),
        (_OWNER, "3", "only a reboot changes; let later jobs listen: `memtriage install-listener`"),
        (_OWNER, "0", "--cap-add=SYS_PTRACE"),
        (_OWNER, None, "--cap-add=SYS_PTRACE"),
        (0, "1", "--cap-add=SYS_PTRACE"),
        (0, "3", "only a reboot changes"),
        (4711, "0", "it belongs to user 1000; run `sudo -u '#1000' memtriage attach [0-9]+`"),
    ],
)
def test_the_missing_right(
    user: int, scope: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, stat = f"/proc/{os.getpid()}", os.stat

    def owned(path: Any, **how: Any) -> os.stat_result:
        found = stat(path, **how)
        if path != folder:
            return found
        return os.stat_result([*found[:4], _OWNER, *found[5:10]])

    file = tmp_path / "ptrace_scope"
    if scope is not None:
        file.write_text(f"{scope}\n")
    monkeypatch.setattr(os, "stat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(answer, "_SCOPE", file)
    text = answer.why_refused(ForbiddenError("process may not be read"), os.getpid(), "attach")
    assert "\n" not in text
    assert re.search(expected, text)


def test_other_errors_stay_as_they_are() -> None:
    assert answer.why_refused(GoneError("process 1 ended"), 1) == "process 1 ended"


_LOSSES = of_module("train", "losses")
_GROUP = HolderGroup(
    device="cpu", anchor=_LOSSES, path=_LOSSES, count=2, nbytes=800, by_path={_LOSSES: 800},
    owners={"variable": 800}, attached=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("moved", "stopped_s", "way"),
    [
        (None, 0.05, "; the process was stopped for 50 ms"),
        (0, 0.0, ""),
        (1200, 0.0, " and without 1,200 storages that came and went meanwhile"),
    ],
)
def test_an_answer_says_how_the_process_was_read(
    monkeypatch: pytest.MonkeyPatch, moved: int | None, stopped_s: float, way: str
) -> None:
    asked: list[tuple[int, bool, float, float]] = []

    def census(pid: int, *, pause: bool, pause_s: float, within_s: float) -> OutsideCensus:
        asked.append((pid, pause, pause_s, within_s))
        return OutsideCensus(
            groups=[_GROUP], storages=[], details={}, at=1.0, objects=30, nodes=4, moved=moved,
            seconds=0.25, stopped_s=stopped_s + 1e-9, missing=["a part"], notes=["a note"],
        )  # fmt: skip

    monkeypatch.setattr(answer, "take_census", census)
    found = answer.read_answer(os.getpid(), 7.0, pause_s=stopped_s)
    assert asked == [(os.getpid(), moved is None, stopped_s, 7.0)]
    assert found.incomplete == ["a part"]
    assert (found.pid, found.host, found.argv) == (
        os.getpid(),
        socket.gethostname(),
        answer.arguments(os.getpid()),
    )
    assert (found.paused_s, found.objects, found.nodes) == (stopped_s, 30, 4)
    assert found.holders == [
        HeldHere(device="cpu", holder_path=_LOSSES, count=2, bytes=800, owners={"variable": 800})
    ]
    assert found.notes == [f"read from outside in 250 ms, without ledgers{way}", "a note"]


def test_a_refused_reading_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, **how: object) -> OutsideCensus:
        raise ForbiddenError("it may not be read")

    monkeypatch.setattr(answer, "take_census", refuse)
    monkeypatch.setattr(answer, "_SCOPE", Path("/nowhere"))
    with pytest.raises(OutsideError, match="it may not be read: a container or a security module") as caught:
        answer.read_answer(os.getpid(), 7.0)
    assert type(caught.value) is OutsideError


def test_the_arguments_of_a_process_and_of_one_that_ended() -> None:
    with job_of("print('ready', flush=True); input()", "", "two words") as job:
        assert answer.arguments(job.pid) == job.args
        job.kill()
        job.wait()
        assert answer.arguments(job.pid) == []
        assert answer.missing_right(job.pid) == "it ended"
