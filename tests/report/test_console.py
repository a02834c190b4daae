"""The forms that reports are made of."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from memtriage.report.console import Page


def printed(hang: int | None) -> list[str]:
    out = io.StringIO()
    Page(Console(file=out, width=20)).hanging(Text("key: "), Text("some words that wrap"), hang=hang)
    return out.getvalue().splitlines()


def test_later_lines_hang_below_the_text_by_default() -> None:
    assert printed(None) == ["key: some words that", "     wrap"]
    assert printed(2) == ["key: some words that", "  wrap"]
