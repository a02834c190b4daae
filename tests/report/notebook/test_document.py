"""What a report in a notebook consists of."""

from __future__ import annotations

import pytest

from memtriage.model.findings import Finding
from memtriage.model.units import MIB
from memtriage.report.notebook.document import cell_document
from support.cell_reports import report, run_report


@pytest.mark.parametrize("number", [1, 6, 8])
def test_the_first_six_findings_are_shown(number: int) -> None:
    findings = [Finding(kind="residue", device="cpu", holder=f"h{at}", bytes=MIB) for at in range(number)]
    part = cell_document(report(run_report=run_report(verdict="residue", findings=findings))).parts[0]
    shown = [group.first.holder for group in part["groups"]]
    assert shown == [f"h{at}" for at in range(min(6, number))]
    assert part["more"] == max(0, number - 6)
