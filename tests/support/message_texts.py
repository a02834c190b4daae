"""The corpora of messages about memory: their records, every text with its id, and errors of programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

DATA: Final = Path(__file__).parents[1] / "data"


def records(corpus: str) -> list[dict[str, Any]]:
    """The messages of a corpus, with what is true of each."""
    return [json.loads(line) for line in (DATA / f"{corpus}.jsonl").read_text().splitlines()]


TEXTS: Final[dict[str, str]] = {
    f"{path.stem}:{record['id']}": record["text"]
    for path in sorted(DATA.glob("oom_messages*.jsonl"))
    for record in records(path.stem)
}
ERRORS: Final[dict[str, str]] = json.loads((DATA / "error_texts.json").read_text())
"""What exceptions said, by what is special about each."""
