"""The exercises of the tutorial have the solutions that it gives."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.documents import ROOT

EXERCISES = ROOT / "examples/exercises"
STORED, DETACHED = "append(value)", "append(value.detach())"


def watched(script: Path, folder: Path) -> dict[str, Any]:
    result = folder / "result.json"
    command = [sys.executable, "-m", "memtriage", "run", "-o", folder / "run", "--json", result, script]
    subprocess.run(command, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.slow
def test_the_leak_of_the_first_exercise_is_named(tmp_path: Path) -> None:
    (leak,) = watched(EXERCISES / "find_the_leak.py", tmp_path)["findings"]
    saved = 256 * 256 * 4 + 256 * 512 * 4  # the input and the hidden values of a batch
    assert leak["bytes_per_step"] == pytest.approx(saved, rel=0.1)
    assert "log.values['validation']" in leak["holder"] and ".detach()" in leak["fix"]


@pytest.mark.slow
def test_its_solution_is_clean(tmp_path: Path) -> None:
    text = (EXERCISES / "find_the_leak.py").read_text()
    assert STORED in text and DETACHED in (ROOT / "docs/tutorial.md").read_text()
    script = tmp_path / "solved.py"
    script.write_text(text.replace(STORED, DETACHED))
    assert watched(script, tmp_path)["verdict"] == "clean"


def test_the_error_of_the_second_exercise_is_fragmentation() -> None:
    command = [sys.executable, "-m", "memtriage", "explain", "--json", EXERCISES / "out_of_memory.log"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert answer["diagnosis"] == "fragmentation", answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "page"),
    [("plan {} --budget 4GiB", "fit_plan.txt"), ("predict {} --explain", "fit_prediction.txt")],
)
def test_the_gallery_shows_what_the_third_exercise_prints(words: str, page: str) -> None:
    command = [sys.executable, "-m", "memtriage", *words.format("examples/exercises/fit.py:build").split()]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    shown = (ROOT / "docs/gallery" / page).read_text()
    words_printed, words_shown = (re.sub(r"in\s+[\d.]+ s", "", text).split() for text in (printed, shown))
    assert words_printed == words_shown


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["4GiB", "2GiB"])
def test_the_plans_of_the_third_exercise_are_those_of_the_page(budget: str) -> None:
    exercise = f"{EXERCISES / 'fit.py'}:build"
    command = [sys.executable, "-m", "memtriage", "plan", exercise, "--budget", budget, "--json"]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (step,) = plan["steps"]
    page = (ROOT / "docs/tutorial.md").read_text()
    assert plan["fits"] and step["action"] in page, step
