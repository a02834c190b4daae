"""A comparison as a page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from memtriage.model.trials import TrialsReport
from memtriage.prove.result import make_report
from memtriage.prove.state import ComparisonState
from memtriage.report.html.shell import LARGEST
from memtriage.report.trials.page import html
from support.chromium import Chromium
from support.page_data import data_in
from support.trials import GIB, MORE, trials_of


def test_a_page_of_which_nothing_ran(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a", "b", more=MORE.split("[[target]]")[0])
    nothing = make_report(trials, ComparisonState(tmp_path / "out", trials))
    (first, _) = data_in(html(nothing))["variants"]
    assert [value for value, *_ in first["cells"]] == [None] * 5


def test_the_pages_data(report: TrialsReport) -> None:
    data = data_in(html(report))
    assert data["verdict"]["level"] == "bad"
    assert [variant["cells"][0][0] is None for variant in data["variants"]] == [False, False, False, True]
    assert len(data["variants"][1]["steps"]) == 3
    assert data["variants"][1]["ranks"][0] == [9 * GIB, 12 * GIB]
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


def test_the_page_as_a_browser_shows_it(report: TrialsReport, chromium: Chromium) -> None:
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
