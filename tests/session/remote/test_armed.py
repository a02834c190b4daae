"""A process that answers though nobody watches it."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from memtriage.model.asked import Answer
from memtriage.process import active
from memtriage.session.remote import answer as answer_module
from memtriage.session.remote import armed
from memtriage.session.remote.ask import ask
from memtriage.session.remote.socket_path import socket_of


@pytest.fixture(autouse=True)
def unwatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Below the test's own directory, as in a process that is not memtriage's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(active, "session", None)
    monkeypatch.setattr(active, "listener", None)
    monkeypatch.delitem(sys.modules, "memtriage.cli.app", raising=False)
    ends: list[Any] = []
    monkeypatch.setattr(atexit, "register", ends.append)
    yield
    for end in ends:
        end()
    assert socket_of(os.getpid()) is None


def test_it_answers_without_what_nobody_counts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def taken(*given: Any, **options: Any) -> Answer:
        return Answer(pid=os.getpid(), objects=5, step=1, microbatch=2, doing="forward", run_id="x")

    monkeypatch.setattr(answer_module, "answer_in_copy", lambda *given: None)
    monkeypatch.setattr(answer_module, "take_answer", taken)
    armed.arm()
    answer = ask(os.getpid(), 60)
    assert (answer.objects, answer.rank) == (5, 3)
    assert (answer.run_id, answer.step, answer.microbatch, answer.doing) == (None, None, None, None)
    listener = active.listener
    armed.arm()
    assert active.listener is listener is not None
    assert capfd.readouterr() == ("", "")


def test_a_watched_process_and_memtriage_s_own_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = SimpleNamespace()
    monkeypatch.setattr(active, "session", session)
    armed.arm()
    assert active.listener is None
    monkeypatch.setattr(active, "session", None)
    monkeypatch.setitem(sys.modules, "memtriage.cli.app", ModuleType("app"))
    armed.arm()
    assert active.listener is None
