"""Writes the tables of README.md from the JSON of the last runs: `table.py` (`--check` only compares)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from memtriage.playbook.entries import PLAYBOOK

HERE: Final = Path(__file__).parent
README: Final = HERE / "README.md"
FILES: Final = ("h200.json", "cpu.json")
BEGIN: Final = "<!-- begin: made by table.py from results/ -->"
END: Final = "<!-- end -->"
COLUMNS: Final = {
    "symptom": "symptom",
    "said": "memtriage said",
    "fix": "fix",
    "effect": "measured effect",
    "predicted": "predicted",
}
"""Of a row: its field in the results, and its heading."""
BRIEF: Final = ("symptom", "effect", "predicted")
"""Columns of the tables after the first: the others are the same but for sizes."""


def table(result: dict[str, Any], fields: Sequence[str] = tuple(COLUMNS)) -> str:
    """A run's table in Markdown, with what it ran on."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = f"### {result['hardware']}\n\n{result['date']}, {versions}.\n"
    headings = ["entry", *(COLUMNS[field] for field in fields)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    empty = " |" * (len(fields) - 1)
    rows = {row["entry"]: row for row in result["rows"]}
    for entry in PLAYBOOK:
        name = f"[{entry}](../../docs/playbook.md#{_anchor(entry)})"
        row = rows.get(entry)
        if row is None:
            lines.append(f"| {name} | not in this run |{empty}")
            continue
        if row["error"]:
            lines.append(f"| {name} | failed: {_cell(row['error'])} |{empty}")
            continue
        cells = (row[field] for field in fields)
        lines.append(f"| {name} | {' | '.join(map(_cell, cells))} |")
    return "\n".join([head, *lines])


def _anchor(entry: str) -> str:
    words = f"{entry} {PLAYBOOK[entry].subject}".lower()
    return "".join(letter for letter in words.replace(" ", "-") if letter.isalnum() or letter == "-")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def generated() -> str:
    """README.md as the results say."""
    text = README.read_text()
    begin, rest = text.split(BEGIN)
    _, end = rest.split(END)
    results = [json.loads((HERE / "results" / name).read_text())
               for name in FILES if (HERE / "results" / name).exists()]  # fmt: skip
    tables = [table(result, BRIEF if number else tuple(COLUMNS)) for number, result in enumerate(results)]
    return f"{begin}{BEGIN}\n\n" + "\n\n".join(tables) + f"\n\n{END}{end}"


def write() -> None:
    """Writes README.md."""
    README.write_text(generated())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="status 1 where README.md differs")
    if not parser.parse_args().check:
        write()
    elif README.read_text() != generated():
        sys.exit("README.md differs from its results: python cases/playbook/table.py")


if __name__ == "__main__":
    main()
