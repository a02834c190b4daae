"""The catalogue in words: every entry on the page of the documentation, which is the one that is made now."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from memtriage.catalogue.catalogue import BUILT_IN
from memtriage.catalogue.entry import Holder
from memtriage.catalogue.installed import holders_here
from memtriage.report.holders import markdown, render

PAGE = Path(__file__).parents[2] / "docs" / "holders.md"


def printed(version: str | None, *, every: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False, markup=False, emoji=False)
    render(holders_here(BUILT_IN, lambda holder: version), console, every=every)
    return out.getvalue()


def test_the_page_of_the_documentation_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), "python -m memtriage.report.holders > docs/holders.md"


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda one: one.name)
def test_an_entry_has_its_row_of_four_cells(entry: Holder) -> None:
    (row,) = [line for line in markdown().splitlines() if line.startswith(f"| `{entry.name}` |")]
    assert row.replace("\\|", "").count("|") == 5


def test_what_is_not_installed_is_printed_only_when_asked_for() -> None:
    short, whole = printed(None, every=False), printed(None, every=True)
    assert "te.fp8_workspaces" not in short and "generic.lru_cache" in short
    assert "memtriage holders --all" in short and "memtriage holders --all" not in whole
    assert all(holder.name in whole for holder in BUILT_IN)
    assert "not installed" in whole


def test_versions_say_where_the_leak_is_and_which_has_the_fix() -> None:
    text = " ".join(printed("2.12.0", every=False).split())
    assert "TransformerEngine 2.12.0 has it: ops/fuser.py OperationFuser (from 2.0 on, fixed in 2.14)" in text
    assert "te.tensor_objects" not in printed("2.15.1", every=False)
