"""A comparison on the terminal."""

from __future__ import annotations

import msgspec
import pytest

from memtriage.model.trials import TrialsReport
from memtriage.report.trials.terminal import render
from support.printed import printed


def text_of(report: TrialsReport, width: int, *, colors: bool = False) -> str:
    return printed(render, report, width=width, colors=colors)


@pytest.fixture
def noted(report: TrialsReport) -> TrialsReport:
    """With something in every part; a name too long for its column."""
    first, second, *others = report.variants
    long = msgspec.structs.replace(second, name="fp8 with a name that has no end at all")
    found = msgspec.structs.replace(first, findings=["2 leaks on cuda:0", "residue"])
    return msgspec.structs.replace(
        report, variants=[found, long, *others], notes=["rounds 1 and 2 overlapped", "the node was shared"]
    )


@pytest.mark.parametrize("width", [40, 60, 80, 81, 90, 200])
def test_the_report_fits(noted: TrialsReport, width: int) -> None:
    lines = text_of(noted, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("fp8 + phase" in line for line in lines)
    assert not any(line != line.rstrip() for line in lines)


def test_the_table_is_there_where_there_is_room_for_names(report: TrialsReport) -> None:
    """The narrowest page with a table; one column less, and figures are listed."""
    widths = [width for width in range(40, 120) if "variant  " in text_of(report, width)]
    assert widths == list(range(widths[0], 120))
    narrow = text_of(report, widths[0]).splitlines()
    assert any(line.startswith("fp8 + phase ") for line in narrow)
    assert max(map(len, narrow[3:])) <= widths[0]
    assert "time per step" in text_of(report, widths[0] - 1)
