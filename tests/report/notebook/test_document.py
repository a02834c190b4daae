"""What a report in a notebook consists of."""

from __future__ import annotations

import pytest

from memtriage.model.cell import MemoryNow
from memtriage.model.findings import Finding
from memtriage.model.marks import Mark
from memtriage.model.units import MIB
from memtriage.report.notebook.document import cell_document, now_document
from support.cell_reports import report, rising, run_report


def test_parts_without_anything_are_left_out() -> None:
    assert [part["kind"] for part in cell_document(report(came=[])).parts] == ["devices"]
    assert now_document(MemoryNow(ledgers=[], holders=[], more={})).parts == []


@pytest.mark.parametrize("number", [1, 6, 8])
def test_the_first_six_findings_are_shown(number: int) -> None:
    findings = [Finding(kind="residue", device="cpu", holder=f"h{at}", bytes=MIB) for at in range(number)]
    part = cell_document(report(run_report=run_report(verdict="residue", findings=findings))).parts[0]
    shown = [group.first.holder for group in part["groups"]]
    assert shown == [f"h{at}" for at in range(min(6, number))]
    assert part["more"] == max(0, number - 6)


@pytest.mark.parametrize(
    ("marks", "found_on", "drawn"),
    [
        (rising("cpu", MIB, 2 * MIB, 9 * MIB), None, "malloc in use on cpu at each step"),
        ([*rising("cpu", 1, 2, 3), *rising("cuda:1", 5, 6, 7)], None, "allocated on cuda:1 at each step"),
        ([*rising("cpu", 1, 2, 3), *rising("cuda:1", 5, 6, 7)], "cpu", "malloc in use on cpu at each step"),
        (
            [*rising("cpu", 1, 2, 3, name="backward"), *rising("cpu", 1, 2)],
            None,
            "malloc in use on cpu at each backward",
        ),
        (rising("cpu", 1, None, 2), None, None),
        (rising("cpu", 1, 2, 3, name="time"), None, None),
    ],
)
def test_whose_course_is_drawn(marks: list[Mark], found_on: str | None, drawn: str | None) -> None:
    findings = [] if found_on is None else [Finding(kind="leak", device=found_on, bytes_per_step=MIB)]
    parts = cell_document(report(run_report=run_report(steps=3, marks=marks, findings=findings))).parts
    courses = [f"{part['name']} {part['beside']}" for part in parts if part["kind"] == "course"]
    assert courses == ([] if drawn is None else [drawn])
