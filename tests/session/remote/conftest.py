"""A listener of this process, below the test's own directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memtriage.session.remote.listen import Listener
from support.listening import Answering, Start


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Begins to listen below the test's own directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made: list[Listener] = []

    def begin(answer: Answering) -> Listener:
        listener = Listener(answer)
        made.append(listener)
        listener.start()
        return listener

    yield begin
    for listener in made:
        listener.stop()
