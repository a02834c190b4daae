"""The JSON Schemas in the package are those of the types, and results of the commands are valid by them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from memtriage.cli import app
from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.records import End, RecordedFinding, Start
from memtriage.store.writer import RankWriter
from support import schemas


def _schema(command: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        (files("memtriage.model") / "schemas" / f"{command}.json").read_text()
    )
    return loaded


@pytest.mark.parametrize("command", schemas.TYPES)
def test_files_are_those_of_the_types(command: str) -> None:
    assert (schemas.FOLDER / f"{command}.json").read_text("utf-8") == schemas.text(command), (
        "run: python tests/support/schemas.py"
    )


def _check(command: str, result: str) -> None:
    pytest.importorskip("jsonschema").validate(json.loads(result), _schema(command))


def test_a_report_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RankWriter(record_path(tmp_path, RankIdentity("job", 0, None, 1, None))) as writer:
        writer.write("start", Start(run_id="job", time=1.0, argv=["train.py"]))
        writer.write("finding", RecordedFinding(kind="leak", device="cpu", holder="kept[*]", final=True))
        writer.write("end", End(verdict="leak", steps=4))
    assert app.main(["report", str(tmp_path), "--json"]) == 0
    _check("run", capsys.readouterr().out)


def test_an_explanation_is_valid(capfd: pytest.CaptureFixture[str]) -> None:
    error = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.41 GiB. GPU 5 has a total capacity"
    )
    assert app.main(["explain", "--json", f"{error} of 79.18 GiB of which 1.08 GiB is free."]) == 0
    _check("explain", capfd.readouterr().out)


def test_a_snapshot_is_valid(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    recording = Path(__file__).parents[1] / "data" / "snapshots" / "fragmentation.pickle.gz"
    assert app.main(["snapshot", str(recording), "--json"]) == 0
    _check("snapshot", capfdbinary.readouterr().out.decode())


def test_a_result_with_a_wrong_type_is_not_valid(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": 1, "verdict": "fine"}, _schema("run"))
