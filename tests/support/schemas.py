"""The JSON Schemas of the commands' results: `python tests/support/schemas.py` writes them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from memtriage.model.explanation import Explanation
from memtriage.model.plan import Plan
from memtriage.model.prediction import Prediction
from memtriage.model.report import RunReport
from memtriage.model.trials import TrialsReport

FOLDER: Final = Path(__file__).parents[2] / "src/memtriage/model/schemas"
TYPES: Final[dict[str, Any]] = {
    "run": RunReport,
    "explain": Explanation,
    "predict": Prediction,
    "plan": Plan,
    "compare": TrialsReport,
}
"""What each command's `--json` prints; `report` prints what `run` writes."""


def text(command: str) -> str:
    """Return the schema of a command's result, as its file has it."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"memtriage {command} --json",
        **msgspec.json.schema(TYPES[command]),
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in TYPES:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")
