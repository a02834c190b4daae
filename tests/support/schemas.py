"""The JSON Schemas of the commands' results: `python tests/support/schemas.py` writes them again."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Final

import msgspec

from memtriage.model.difference import Difference, GateResult
from memtriage.model.explanation import Explanation
from memtriage.model.plan import Plan
from memtriage.model.prediction import Prediction
from memtriage.model.report import RunReport
from memtriage.model.snapshot_result import SnapshotResult
from memtriage.model.trials import TrialsReport

FOLDER: Final = Path(__file__).parents[2] / "src/memtriage/model/schemas"
TYPES: Final[dict[str, Any]] = {
    "run": RunReport,
    "explain": Explanation,
    "snapshot": SnapshotResult,
    "predict": Prediction,
    "plan": Plan,
    "compare": TrialsReport,
    "diff": Difference,
    "gate": GateResult,
}
"""What each command's `--json` prints; `report` prints what `run` writes."""


def text(command: str) -> str:
    """Return the schema of a command's result, as its file has it."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"memtriage {command} --json",
        **_without_indentation(msgspec.json.schema(TYPES[command])),
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _without_indentation(schema: Any) -> Any:
    """Remove the indentation of docstrings, which Python from 3.13 on has removed already."""
    if isinstance(schema, dict):
        return {
            key: inspect.cleandoc(value)
            if key == "description" and isinstance(value, str)
            else _without_indentation(value)
            for key, value in schema.items()
        }
    return [_without_indentation(item) for item in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    for name in TYPES:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")
