"""Scripts whose host memory is predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memtriage.model.prediction import Prediction
from memtriage.prediction.api import predict_program
from memtriage.prediction.host import libraries, memory
from memtriage.prediction.script import Script
from support.traced import traced


@pytest.fixture
def host_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Prediction]:
    """Predict the host memory of a script in its own folder; libraries take 1,000 bytes of each process, and
    2,000 that are shared, as measuring takes seconds."""
    fixed = memory.Libraries(own=1000, shared=2000, launcher=500)
    monkeypatch.setattr("memtriage.prediction.trace.measure", lambda *given: fixed)
    monkeypatch.setattr("memtriage.prediction.host.loaders.measure_worker", lambda forked: 10_000)
    monkeypatch.chdir(tmp_path)
    assert libraries.measure is not None

    def predict(text: str, **options: object) -> Prediction:
        file = tmp_path / "train.py"
        file.write_text(text)
        return predict_program(Script(str(file)), host=[].append, **{"gpu": "none", **options})

    return predict


@pytest.fixture
def host_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, list[str], list[str]]]:
    """What a function returns, what it allocates and frees on the host, and notes of the trace.

    Blocks are `+bytes class place`, frees `-bytes class`; libraries are not measured.
    """
    monkeypatch.setattr("memtriage.prediction.trace.measure", lambda *given: memory.Libraries())
    monkeypatch.setattr("memtriage.prediction.host.loaders.measure_worker", lambda forked: 10_000)
    monkeypatch.chdir(tmp_path)

    def story(run: Callable[[Any], Any], **options: Any) -> tuple[Any, list[str], list[str]]:
        done = traced(run, **{"gpu": "none", **options}, host=True)
        assert done.trace.host is not None
        lines = []
        for event in done.trace.host.events:
            block = done.trace.host.blocks[event.block]
            kind = done.trace.host.owners.get(event.block, block.kind)
            lines.append(
                f"+{block.size} {kind} {block.place.name.lower()}" if event.size else f"-{block.size} {kind}"
            )
        return done.answer, lines, done.notes

    return story
