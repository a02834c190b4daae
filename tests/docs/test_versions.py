"""The table of supported versions has the pairs that the workflow runs, and no others."""

from __future__ import annotations

import re

from support import alone, documents

PAGE = documents.ROOT / "docs" / "versions.md"
WORKFLOW = documents.ROOT / ".github" / "workflows" / "test.yml"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _documented() -> set[tuple[str, str, str]]:
    """Python, torch and machine of each row, without the rows that have no torch."""
    rows = re.findall(r"^\| (3\.[\d.]+) \| ([\d.]+)[^|]* \| (x86-64|aarch64)", PAGE.read_text(), re.MULTILINE)
    return {(_minor(python), _minor(torch), machine) for python, torch, machine in rows}


def test_the_workflow_runs_the_pairs_of_the_page() -> None:
    jobs = re.findall(
        r"make: (test test-slow|cell), os: ubuntu-[\d.]+(-arm)?, python: \"([\d.]+)\", torch: ([\d.]+)",
        WORKFLOW.read_text(),
    )
    run = {(python, _minor(torch), "aarch64" if arm else "x86-64") for _, arm, python, torch in jobs}
    assert len(run) == len(jobs) and run == _documented()


def test_every_row_has_a_date_or_says_that_it_was_not_run() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| 3\.\d", line)]
    assert rows
    for row in rows:
        assert re.search(r"\d{4}-\d\d-\d\d|at every change|\| not run", row), row


def test_every_extra_is_named_with_the_day_it_was_tried() -> None:
    section = PAGE.read_text().partition("## Extras")[2].partition("\n## ")[0]
    assert re.search(r"\d{4}-\d\d-\d\d", section)
    assert set(re.findall(r"`(\w+)`", section)) == set(alone.EXTRAS) - {"dev"}
