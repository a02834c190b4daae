"""Scripts whose host memory is predicted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from memtriage.model.prediction import Prediction
from memtriage.prediction.api import predict_program
from memtriage.prediction.host import libraries, memory
from memtriage.prediction.script import Script


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
