"""A comparison on the terminal and as a page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from memtriage.model.trials import TrialsReport
from memtriage.prove.result import make_report
from memtriage.prove.state import ComparisonState
from memtriage.report.html.shell import LARGEST
from memtriage.report.trials.page import html
from memtriage.report.trials.terminal import render
from support.chromium import Chromium, find
from support.trials import HEAD, MIB, trials_of, write_trial

GIB = 1024 * MIB
MORE = """
[values]
loss = 'loss ([0-9.]+)'
[[target]]
metric = "reserved"
variant = "fp8 + phase"
at_most = "1.1 x allocated + 100 MB"
[[target]]
metric = "time_per_step"
variant = "fp8 + phase"
at_most = "1.01 x fp8"
[[target]]
metric = "allocated"
variant = "fp8"
at_most = "bf16"
"""


@pytest.fixture
def report(tmp_path: Path) -> TrialsReport:
    """Four variants on two ranks: of `fp8` one rank holds more, `fp8 + large` dies."""
    head = HEAD + 'ranks = 2\nname = "FP8 <refit>"\n'
    trials = trials_of(tmp_path, "bf16", "fp8", "fp8 + phase", "fp8 + large", more=MORE, head=head)
    state = ComparisonState(tmp_path / "out", trials)
    for number, level in enumerate((10.0, 10.4, 9.8)):
        for name, factor, first, second in (
            ("bf16", 1.2, (600 * MIB, 700 * MIB), (600 * MIB, 700 * MIB)),
            ("fp8", 1.0, (9 * GIB, 26 * GIB), (12 * GIB, 26 * GIB)),
            ("fp8 + phase", 1.004 if number else 0.999, (500 * MIB, 560 * MIB), (500 * MIB, 560 * MIB)),
        ):
            write_trial(
                state,
                name,
                number,
                [30.0, factor * level, 1.01 * factor * level],
                ranks={0: [first] * 3, 1: [second] * 3},
                log="loss 2.5\nloss 2.25\n",
            )
    for number in range(2):
        write_trial(state, "fp8 + large", number, outcome="out_of_memory", error="OutOfMemoryError: 2 GiB")
    return make_report(trials, state)


def text_of(report: TrialsReport, width: int) -> str:
    stream = io.StringIO()
    render(report, Console(file=stream, width=width, highlight=False, markup=False, emoji=False))
    return stream.getvalue()


def test_the_terminal_report(report: TrialsReport) -> None:
    text = text_of(report, 100)
    lines = text.splitlines()
    assert lines[0] == "TARGET MISSED  2 met, 1 missed, of 3 targets"
    (row,) = [line for line in lines if line.startswith("fp8 + phase  ")]
    assert re.split(r"\s{2,}", row) == [
        "fp8 + phase",
        "10.04 s",
        "0.837 x",
        "500.0 MiB",
        "560.0 MiB",
        "560.0 MiB",
    ]
    below = lines[lines.index(row) + 1]
    assert "3 of 3 trials" in below
    assert re.search(r"^3 of 3 trials .* 9\.0-12\.0 GiB$", text, re.MULTILINE)
    assert "below a size: lowest and highest rank" in " ".join(text.split())
    assert "fp8, allocated: rank 1 at 12.0 GiB, others at 9.0 GiB" in text
    assert "fp8 + large: out of memory in rounds 1, 2: OutOfMemoryError: 2 GiB" in text
    assert "fp8 + large: 1 trial left out after failures in a row" in text
    assert "2.5 -> 2.25 (2 values), the same as bf16, value for value" in text
    assert "met        fp8 + phase: reserved at most 1.1 x allocated + 100 MB" in text
    assert max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 81, 90, 200])
def test_the_terminal_report_fits(report: TrialsReport, width: int) -> None:
    lines = text_of(report, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("fp8 + phase" in line for line in lines)


def test_a_comparison_of_which_nothing_ran(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b", more=MORE.split("[[target]]")[0])
    nothing = make_report(trials, ComparisonState(tmp_path / "out", trials))
    assert "6 of 6 trials are still to come" in text_of(nothing, 120)
    assert '"time": null' in json.dumps(data_in(html(nothing)))


def data_in(page: str) -> dict[str, Any]:
    match = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    return data


def test_the_pages_data(report: TrialsReport) -> None:
    data = data_in(html(report))
    assert data["verdict"]["level"] == "bad"
    assert [variant["failed"] for variant in data["variants"]] == [False, False, False, True]
    assert len(data["variants"][1]["steps"]) == 3
    assert data["variants"][1]["memory"][0]["ranks"] == [9 * GIB, 12 * GIB]
    assert [target["level"] for target in data["targets"]] == ["good", "good", "bad"]


def test_a_page_of_very_many_steps_is_thinned(report: TrialsReport) -> None:
    row = report.variants[0]
    long = [
        msgspec.structs.replace(trial, steps=[1 / 3 + at for at in range(50_000)]) for trial in row.trials
    ]
    many = [msgspec.structs.replace(row, steps=150_000, trials=long) for _ in range(8)]
    page = html(msgspec.structs.replace(report, variants=many))
    assert len(page.encode()) < LARGEST
    assert 500 < len(data_in(page)["variants"][0]["steps"][0]) < 1000


def test_the_page_as_a_browser_shows_it(report: TrialsReport, tmp_path: Path) -> None:
    page = html(report)
    assert len(page.encode()) < LARGEST
    script = """
        return {
            ready: document.documentElement.dataset.ready,
            title: document.querySelector("h1").textContent,
            rows: document.querySelectorAll("table.rows tbody tr").length,
            first: document.querySelector("table.rows tbody td").textContent,
            targets: [...document.querySelectorAll(".target .word")].map((one) => one.textContent),
            charts: [...document.querySelectorAll(".chart canvas")].map((one) => one.width > 0),
            drawn: [...document.querySelectorAll(".chart canvas")].map((one) => {
                const { data } = one.getContext("2d").getImageData(0, 0, one.width, one.height);
                return new Set(Array.from({ length: data.length / 4 }, (_, at) => data[4 * at])).size > 3;
            }),
            wide: document.documentElement.scrollWidth <= innerWidth,
        };
    """
    chromium = Chromium(find(), tmp_path)
    for width in (1200, 380):
        visit = chromium.visit(page, script, width=width)
        assert visit.console == []
        assert visit.result == {
            "ready": "true",
            "title": "FP8 <refit>",
            "rows": 4,
            "first": "bf163 of 3 trials, baseline",
            "targets": ["met", "met", "missed"],
            "charts": [True, True],
            "drawn": [True, True],
            "wide": True,
        }
