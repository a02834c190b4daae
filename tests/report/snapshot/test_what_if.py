"""Outcomes in words and as JSON."""

from __future__ import annotations

from memtriage.allocator.what_if import Scenario, WhatIfOutcome
from memtriage.report.snapshot.what_if import as_json, render
from support.printed import printed

GIB = 1 << 30


def scenario(
    name: str, *, failed_at: int | None = None, recorded_ooms: int = 0, met_ooms: int = 0
) -> Scenario:
    outcome = WhatIfOutcome(
        peak_reserved=12 * GIB,
        peak_allocated=8 * GIB,
        end_reserved=4 * GIB,
        end_allocated=2 * GIB,
        end_stranded=GIB,
        end_releasable=GIB,
        retries=0,
        failed_at=failed_at,
        recorded_ooms=recorded_ooms,
        met_ooms=met_ooms,
    )
    return Scenario(name, outcome)


def shown(*scenarios: Scenario) -> str:
    return printed(render, [("cuda:0", scenarios)], width=120)


def test_a_line_for_each_setting() -> None:
    text = shown(scenario("as recorded"), scenario("expandable_segments:True"))
    assert "cuda:0" in text
    words = "peak 12.0 GiB reserved; at the end 4.0 GiB, of which 1.0 GiB stranded"
    assert [line.split("  ")[-1].strip() for line in text.splitlines() if "peak" in line] == [words] * 2


def test_errors_that_are_met_or_avoided() -> None:
    text = shown(
        scenario("as recorded", recorded_ooms=1, met_ooms=1),
        scenario("expandable_segments:True", recorded_ooms=1),
        scenario("max_split_size_mb:128", failed_at=77),
    )
    assert "stranded; 1 out-of-memory error met\n" in text
    assert "stranded; 1 out-of-memory error avoided\n" in text
    assert "out of memory at event 77" in text


def test_json_has_every_figure() -> None:
    told = as_json([("cuda:0", [scenario("as recorded", recorded_ooms=1, met_ooms=1)])])
    assert told["schema"] == 1
    (device,) = told["devices"]
    assert device["device"] == "cuda:0"
    (one,) = device["scenarios"]
    assert (one["name"], one["fits"], one["peak_reserved"], one["met_ooms"]) == (
        "as recorded",
        False,
        12 * GIB,
        1,
    )
