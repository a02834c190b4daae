"""The page of the playbook in the documentation is the one that the package makes."""

from __future__ import annotations

import re
from pathlib import Path

from memtriage.playbook.entries import ACTIONS, PLAYBOOK
from memtriage.report.playbook import markdown

PAGE = Path(__file__).parents[2] / "docs" / "playbook.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m memtriage.report.playbook > docs/playbook.md"
    )


def test_every_entry_and_action_is_on_it() -> None:
    page = markdown()
    for entry in PLAYBOOK.values():
        assert f"## {entry.name}. {entry.subject}\n" in page
    plain = page.replace("\\", "").splitlines()
    for entry, change in ACTIONS.values():
        start, end = (
            (f"| {change.action} | {change.saves} |", f" {change.no_help} |")
            if change in entry.rungs
            else (f"- {change.action}. ", f" {change.no_help}.")
        )
        (line,) = [line for line in plain if start in line]
        assert line.endswith(end)


def test_links_lead_to_headings() -> None:
    page = markdown()
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line[3:].lower()).replace(" ", "-")
        for line in page.splitlines()
        if line.startswith("## ")
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert links and links <= headings
