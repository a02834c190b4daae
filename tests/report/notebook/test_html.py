"""A cell's report as a fragment of a page."""

from __future__ import annotations

import re

import pytest

from memtriage.model.cell import CellReport
from memtriage.model.findings import Finding
from memtriage.model.marks import Mark
from memtriage.model.units import MIB
from memtriage.report.notebook.document import cell_document
from memtriage.report.notebook.html import html
from support.cell_reports import Balanced, change, report, rising, run_report

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


@pytest.mark.parametrize(
    ("values", "points", "ends"),
    [
        ((MIB, 3 * MIB, 2 * MIB), "0.0,98.0 500.0,2.0 1000.0,50.0", "step 1 1.0 MiB to 3.0 MiB step 3"),
        ((3 * MIB, None, MIB, MIB), "0.0,2.0 500.0,98.0 1000.0,98.0", "step 1 1.0 MiB to 3.0 MiB step 4"),
    ],
)
def test_a_course_goes_from_edge_to_edge(values: tuple[int | None, ...], points: str, ends: str) -> None:
    page = cell_html(report(run_report=run_report(steps=3, marks=rising("cuda:0", *values))))
    assert f'<polyline class="line" points="{points}"/>' in page
    assert f'points="0,100 {points} 1000,100"' in page
    assert ends in Balanced(page).text


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
    assert "script" not in page.tags
    assert page.text.count(HOSTILE) >= 4


def test_names_that_utf_8_lacks_are_shown() -> None:
    assert "cache?[*]" in Balanced(cell_html(report(came=[change("cache\ud800[*]", MIB)]))).text


def test_a_finding_names_its_entry_of_the_playbook() -> None:
    entry, none = (
        cell_html(report(run_report=run_report(findings=[Finding(kind="leak", device="cpu", playbook=name)])))
        for name in ("M1", None)
    )
    assert "M1" in Balanced(entry).text and "M1" not in Balanced(none).text


def test_the_course_is_drawn_where_it_rises() -> None:
    def marks(step_bytes: int) -> list[Mark]:
        return [
            Mark(
                name="step", step=step, microbatch=1, rank=None, time_s=step, device="cuda:0",
                allocated=MIB + step * step_bytes,
            )
            for step in range(1, 2000)
        ]  # fmt: skip

    drawn = cell_html(report(run_report=run_report(steps=1999, marks=marks(1 << 16))))
    assert "allocated on cuda:0" in Balanced(drawn).text
    assert len(drawn) < 30_000
    assert "<svg" not in cell_html(report(run_report=run_report(steps=1999, marks=marks(0))))
