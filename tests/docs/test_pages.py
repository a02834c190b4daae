"""Tables that the package has as data are on their pages: the playbook, known holders, names of metrics."""

from __future__ import annotations

import re

import pytest

from memtriage.catalogue.catalogue import BUILT_IN
from memtriage.catalogue.entry import Holder
from memtriage.playbook.entries import ACTIONS, PLAYBOOK
from support import pages

PLAYBOOK_PAGE, HOLDERS_PAGE = "\n".join(pages.playbook()), "\n".join(pages.holders())


@pytest.mark.parametrize("name", pages.PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    assert (pages.DOCS / name).read_text(encoding="utf-8") == pages.written(name), (
        "run: python tests/support/pages.py"
    )


def test_every_entry_and_action_is_on_it() -> None:
    for entry in PLAYBOOK.values():
        assert f"## {entry.name}. {entry.subject}\n" in PLAYBOOK_PAGE
    plain = PLAYBOOK_PAGE.replace("\\", "").splitlines()
    for entry, change in ACTIONS.values():
        start, end = (
            (f"| {change.action} | {change.saves} |", f" {change.no_help} |")
            if change in entry.rungs
            else (f"- {change.action}. ", f" {change.no_help}.")
        )
        (line,) = [line for line in plain if start in line]
        assert line.endswith(end)


def test_links_lead_to_headings() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).replace(" ", "-")
        for line in PLAYBOOK_PAGE.splitlines()
        if line.startswith("## ")
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", PLAYBOOK_PAGE))
    assert links and links <= headings


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda one: one.name)
def test_a_holder_has_its_row_of_three_cells(entry: Holder) -> None:
    (row,) = [line for line in HOLDERS_PAGE.splitlines() if line.startswith(f"| `{entry.name}` |")]
    assert row.replace("\\|", "").count("|") == 4
