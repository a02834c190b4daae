"""What runs inside a process that is asked from outside: its answer comes as a whole file, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from memtriage.model.asked import Answer
from memtriage.process import active
from memtriage.session.remote import inject_target
from memtriage.session.remote.inject_target import answer_into


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a census of all that pytest has in memory."""
    monkeypatch.setattr(inject_target, "take_answer", lambda: Answer(pid=os.getpid(), objects=5))
    monkeypatch.setattr(active, "session", None)


def answered(folder: Path, borrowed: str | None = None) -> Answer:
    answer_into(str(folder / "answer"), borrowed)
    assert [path.name for path in folder.iterdir()] == ["answer"]
    return msgspec.json.decode((folder / "answer").read_bytes(), type=Answer)


def test_the_answer_is_a_census(tmp_path: Path) -> None:
    answer = answered(tmp_path)
    assert (answer.pid, answer.objects, answer.notes, answer.refused) == (os.getpid(), 5, [], None)
    (tmp_path / "answer").write_text("an older one")
    assert answered(tmp_path).objects == 5


def test_a_borrowed_memtriage_is_noted(tmp_path: Path) -> None:
    assert answered(tmp_path, "/opt/memtriage").notes == [
        "this process could not import memtriage: it was taken from /opt/memtriage, and stays imported"
    ]


def test_nobody_waits_any_more(tmp_path: Path) -> None:
    answer_into(str(tmp_path / "gone" / "answer"), None)
    assert list(tmp_path.iterdir()) == []


def test_a_backward_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject_target, "backward_runs", lambda: True)
    answer = answered(tmp_path)
    assert (answer.pid, answer.retry) == (os.getpid(), True)
    assert answer.refused == "it is inside a backward, whose graph must not be read"


def test_a_backward_that_begins_meanwhile_refuses_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject_target, "take_answer", lambda: None)
    answer = answered(tmp_path)
    assert (answer.pid, answer.refused, answer.retry) == (os.getpid(), "a backward has begun", True)


@pytest.mark.parametrize(("running", "objects"), [(True, 7), (False, 5)])
def test_a_watched_process_answers_by_its_watch_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: bool, objects: int
) -> None:
    waited: list[float] = []

    def answer(within_s: float) -> Answer:
        waited.append(within_s)
        return Answer(pid=1, objects=7)

    session: Any = SimpleNamespace(running=running, answer=answer)
    monkeypatch.setattr(active, "session", session)
    assert answered(tmp_path).objects == objects
    assert waited == ([0.0] if running else [])
