"""Ledgers as the page of a run draws them."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from memtriage.model.census import Owner
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.report.html.shell import asset
from memtriage.report.run.ledger import ledger, row_color
from support.runs import GIB, gpu_rank


@pytest.mark.parametrize("owner", get_args(Owner))
def test_every_owner_has_a_color_of_its_own(owner: str) -> None:
    color = row_color(LedgerRow(row="requested", bytes=1, owner=owner))
    assert re.search(rf"--{color}: light-dark\(", asset("page.css"))
    others = {row_color(LedgerRow(row="requested", bytes=1, owner=other)) for other in get_args(Owner)}
    assert len(others) == len(get_args(Owner))


def test_every_row_has_a_color() -> None:
    for rows in gpu_rank().ledgers.values():
        for row in ledger(rows)["rows"]:
            assert f"--{row['color']}: " in asset("page.css")
    assert row_color(LedgerRow(row="of a newer memtriage", bytes=1)) == "hue-other"


def test_a_ledger_is_drawn_whole_and_closes() -> None:
    one = gpu_rank(growth=GIB).ledgers["cuda:0"]
    shown = ledger(one)
    assert sum(row["bytes"] for row in shown["rows"]) == shown["total"] == one.total
    assert shown["source"] == "cudaMemGetInfo"
    assert [row["row"] for row in shown["rows"] if row["hatched"]] == ["stranded"]


def test_details_are_cut() -> None:
    row = LedgerRow(row="mapped files", bytes=1, detail="x" * 5000)
    shown = ledger(Ledger(device="host", total=1, source="smaps", rows=[row]))
    assert len(shown["rows"][0]["detail"]) == 600


def test_processes_of_a_job_have_different_colors() -> None:
    rows = [LedgerRow(row=f"worker {number}: pages of its own", bytes=GIB) for number in range(4)]
    shown = ledger(Ledger(device="job", total=4 * GIB, source="smaps", rows=rows))
    assert len({row["color"] for row in shown["rows"]}) == 4
