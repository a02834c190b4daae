"""Whole outputs that tests compare with what was checked once and kept: `tests/data/expected/`.

After a wanted change: `MEMTRIAGE_KEEP_EXPECTED=1 pytest FILE`, and read the difference before committing it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

_FOLDER: Final = Path(__file__).parents[1] / "data" / "expected"


def assert_as_kept(name: str, rows: list[Any]) -> None:
    """Compare rows of plain data with those that are kept under a name, one on each line of the file."""
    file = _FOLDER / f"{name}.jsonl"
    lines = [json.dumps(row, sort_keys=True) for row in rows]
    if os.environ.get("MEMTRIAGE_KEEP_EXPECTED") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines))
    assert lines == file.read_text().splitlines()
