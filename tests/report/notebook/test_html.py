"""A cell's report as a fragment of a page."""

from __future__ import annotations

import re

from memtriage.model.cell import CellReport
from memtriage.model.findings import Finding
from memtriage.model.units import MIB
from memtriage.report.notebook.document import cell_document
from memtriage.report.notebook.html import html
from support.cell_reports import Balanced, change, report, run_report

HOSTILE = "cache['</div><script>alert(1)</script>']"


def cell_html(cell: CellReport) -> str:
    return html(cell_document(cell))


def test_the_styles_hold_for_the_report_alone() -> None:
    style = re.search(r"<style>(.*)</style>", cell_html(report()), re.DOTALL)
    assert style is not None and "\n" not in style[1] and "/*" not in style[1]
    assert re.match(r"\.memtriage\{(--[\w-]+:[^;{}]+;){10,}\}", style[1])
    assert all(
        ".memtriage" in rule for rule in re.findall(r"([^{}]+)\{[^{}]*\}", style[1]) if "@" not in rule
    )


def test_names_are_never_markup() -> None:
    finding = Finding(kind="leak", device="cpu", holder=HOSTILE, mechanism=f"`{HOSTILE}` grows", bytes=MIB)
    page = Balanced(
        cell_html(
            report(
                came=[change(HOSTILE, MIB)], notes=[HOSTILE], label=HOSTILE,
                run_report=run_report(verdict="leak", findings=[finding]),
            )
        )
    )  # fmt: skip
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.text.count(HOSTILE) >= 4


def test_names_that_utf_8_lacks_are_shown() -> None:
    assert "cache?[*]" in Balanced(cell_html(report(came=[change("cache\ud800[*]", MIB)]))).text
