"""Every owner has its words."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from memtriage.model.findings import Finding
from memtriage.model.recording import OWNERS, Steps
from memtriage.model.units import MIB
from memtriage.report.html.shell import asset
from memtriage.report.snapshot.words import OWNER_LOOKS, amount, level, verdict


def test_every_owner_has_a_meaning_and_a_color_of_its_own() -> None:
    assert sorted(OWNER_LOOKS) == sorted(OWNERS)
    assert len({look.color for look in OWNER_LOOKS.values()}) == len(OWNERS)
    for look in OWNER_LOOKS.values():
        assert look.meaning and re.search(rf"--{look.color}: light-dark\(", asset("page.css"))


def finding(**fields: object) -> Finding:
    return Finding(**({"kind": "leak", "device": "cuda:0", "bytes": MIB} | fields))


def recorded(findings: list[Finding], steps: int = 0, verdict: str = "clean") -> Any:
    verdict = findings[0].kind if findings else verdict
    ends = tuple(range(steps))
    return SimpleNamespace(findings=findings, steps=Steps(ends), events=range(1200), verdict=verdict)


def test_a_device_without_findings_says_how_much_was_searched() -> None:
    assert verdict(recorded([])) == ("good", "clean", "nothing wrong found in 1,200 events")
    assert verdict(recorded([], 3))[2] == "nothing wrong found in 1,200 events and 3 steps"


def test_a_device_that_was_not_judged_is_not_clean() -> None:
    weight, word, sentence = verdict(recorded([], verdict="not_judged"))
    assert (weight, word) == ("warn", "not judged")
    assert "1,200 events with no steps" in sentence
    assert "1 step" in verdict(recorded([], 1, "not_judged"))[2]


def test_the_first_finding_is_the_verdict() -> None:
    leak = finding(bytes_per_step=MIB, allocated_at="train.py:3 in step")
    assert verdict(recorded([leak])) == ("bad", "leak", "1.0 MiB per step at train.py:3 in step")
    two, three = verdict(recorded([leak] * 2)), verdict(recorded([leak] * 3))
    assert two[2].endswith(", and 1 more finding") and three[2].endswith(", and 2 more findings")


def test_only_growth_is_known_by_its_rate() -> None:
    assert amount(finding(bytes_per_step=MIB)) == "1.0 MiB per step"
    assert amount(finding()) == "1.0 MiB"
    assert amount(finding(kind="residue", bytes_per_step=MIB)) == "1.0 MiB"
    assert amount(finding(kind="out_of_memory")) == "1.0 MiB asked for"


def test_what_ends_a_run_matters_most() -> None:
    assert [level(finding(kind=kind)) for kind in ("leak", "out_of_memory", "fragmentation")] == [
        "bad", "bad", "warn",
    ]  # fmt: skip
