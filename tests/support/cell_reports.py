"""Reports of a notebook's cell, and a reader of their pages."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from memtriage.model.cell import CellReport, DeviceUse, HolderChange
from memtriage.model.report import RankCount, RunReport
from memtriage.model.units import MIB

VOID = {"br"}


def change(holder: str, nbytes: int, count: int = 1) -> HolderChange:
    return HolderChange(device="cuda:0", holder=holder, bytes=nbytes, count=count, owner="variable")


def run_report(**given: Any) -> RunReport:
    fields: dict[str, Any] = {
        "verdict": "clean", "steps": 0, "findings": [], "marks": [], "ledger": {},
        "ranks": RankCount(seen=1, of=1),
    }  # fmt: skip
    return RunReport(**{**fields, **given})


def report(**given: Any) -> CellReport:
    fields: dict[str, Any] = {
        "label": "In[5]", "seconds": 1.25,
        "devices": [DeviceUse(device="cuda:0", before=MIB, after=4 * MIB, peak=9 * MIB)],
        "came": [change("kept[*]", 3 * MIB)], "went": [], "run_report": run_report(),
    }  # fmt: skip
    return CellReport(**{**fields, **given})


class Balanced(HTMLParser):
    """Reads a fragment; every element it opens it must close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)
