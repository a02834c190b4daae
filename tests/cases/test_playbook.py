"""The playbook's case: each entry has a scenario that runs, and the page says what the last runs measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtriage.playbook.entries import PLAYBOOK

CASE = Path(__file__).parents[2] / "cases" / "playbook"
RESULTS = sorted((CASE / "results").glob("*.json"))
ROW = ("symptom", "said", "fix", "effect", "predicted")
FAST = ("M2", "M8", "M19")
LONG = tuple(entry for entry in PLAYBOOK if entry not in FAST)


def run(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=CASE, capture_output=True, text=True, timeout=timeout
    )


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["entry"]: row for row in json.loads(path.read_text())["rows"]}


def test_every_entry_is_listed() -> None:
    listed = run("run.py", "--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(PLAYBOOK)
    assert [line.split(maxsplit=1)[1] for line in listed] == [entry.subject for entry in PLAYBOOK.values()]


def test_the_page_is_what_the_results_generate() -> None:
    checked = run("table.py", "--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_committed_run_has_its_entries_and_no_failure(path: Path) -> None:
    results = rows(path)
    assert list(results) == list(PLAYBOOK)
    assert [entry for entry, row in results.items() if row["error"]] == []
    assert [entry for entry, row in results.items() if not row["named"]] == []


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("entry", ["M14", "M15", "M16", "M17"])
def test_it_died_where_memtriage_had_said(path: Path, entry: str) -> None:
    figures = rows(path)[entry]["figures"]
    assert figures["at"] == figures["predicted"]["dies_at"]
    assert figures["finding"]["kind"] == "out_of_memory"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_leak_died_where_memtriage_had_said(path: Path) -> None:
    figures = rows(path)["M21"]["figures"]
    assert abs(figures["died"] - figures["projected"]) <= 1
    assert figures["verdicts"] == ["leak", "out_of_memory", "clean"]


def test_a_table_says_what_failed() -> None:
    sys.path.insert(0, str(CASE))
    try:
        import table
    finally:
        sys.path.remove(str(CASE))
    result = {
        "hardware": "a GPU", "date": "2026-01-01", "versions": {"torch": "2.8.0"},
        "rows": [
            {"entry": "M5", "error": "RuntimeError: a | b"},
            {"entry": "M6", "error": None, **{name: name[0] for name in ROW}},
        ],
    }  # fmt: skip
    for columns, cells in ((table.COLUMNS, "s | s | f | e | p"), (table.BRIEF, "s | e | p")):
        missing, failed, passed = table.table(result, columns).splitlines()[-len(PLAYBOOK) :][3:6]
        assert "| not in this run | |" in missing
        assert "| failed: RuntimeError: a \\| b | |" in failed
        assert passed == f"| [M6](../../docs/playbook.md#m6-bf16) | {cells} |"


def show(entries: tuple[str, ...], tmp_path: Path, timeout: float) -> dict[str, dict[str, Any]]:
    out = tmp_path / "out.json"
    done = run("run.py", "--device", "cpu", "--only", *entries, "--out", str(out), timeout=timeout)
    assert done.returncode == 0, done.stderr
    return rows(out)


def test_entries_run_on_a_cpu(tmp_path: Path) -> None:
    results = show(FAST, tmp_path, timeout=120)
    assert {entry: (row["error"], row["named"]) for entry, row in results.items()} == dict.fromkeys(
        FAST, (None, True)
    )


@pytest.mark.long
@pytest.mark.parametrize("entry", LONG)
def test_an_entry_runs_on_a_cpu(entry: str, tmp_path: Path) -> None:
    row = show((entry,), tmp_path, timeout=400)[entry]
    assert (row["error"], row["named"]) == (None, True)
