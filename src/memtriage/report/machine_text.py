"""The facts of `memtriage doctor` for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from rich.console import Console

from memtriage.model.machine import Fact, FactStatus
from memtriage.report.console import Page
from memtriage.report.styles import BAD, GOOD, PLAIN_WARN

_STYLES: Final[dict[FactStatus, str]] = {"ok": "", "note": PLAIN_WARN, "bad": BAD}
_LABELS: Final = 35  # columns of the longest name


def render(facts: Sequence[Fact], console: Console) -> None:
    """Print the facts by section, advice after an arrow, and how many settings should be changed."""
    page = Page(console)
    for number, (section, members) in enumerate(groupby(facts, key=lambda fact: fact.section)):
        if number:
            page.gap()
        page.line((section, "bold"))
        for fact in members:
            page.field(fact.name, fact.value, style=_STYLES[fact.status], labels=_LABELS)
            if fact.advice is not None:
                arrow = "!!" if fact.status == "bad" else "->"
                page.field("", f"{arrow} {fact.advice}", labels=_LABELS)
    bad = sum(fact.status == "bad" for fact in facts)
    page.gap()
    page.line((f"{bad} to change" if bad else "nothing to change", BAD if bad else GOOD))
