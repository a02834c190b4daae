"""What a cell's report says, sentence by sentence."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.model.cell import CellReport, DeviceUse, Freed
from memtriage.model.findings import Finding
from memtriage.model.judged import Judged
from memtriage.model.units import MIB
from memtriage.report.notebook.words import (
    change_in_words,
    freed_in_words,
    groups_of,
    headline,
    kept_by_ipython,
    peak_in_words,
    tensors_in_words,
    title,
)
from support.cell_reports import change, report, run_report

JUDGED = {"cuda:0": Judged(scale="step", points=12, reason="12 steps, all of them noisy")}


def leak(**given: Any) -> Finding:
    return Finding(kind="leak", device="cuda:0", holder="kept[*]", bytes=MIB, **given)


@pytest.mark.parametrize(
    ("label", "seconds", "said"), [("In[5]", 4.2, "In[5] · 4.2 s"), ("", 0.25, "250 ms")]
)
def test_a_title_says_which_cell_it_was_and_how_long_it_took(label: str, seconds: float, said: str) -> None:
    assert title(report(label=label, seconds=seconds)) == said


@pytest.mark.parametrize(
    ("verdict", "findings", "steps", "said"),
    [
        ("clean", [], 12, ("clean", "good", "no growth in 12 steps; tensors +3.0 MiB on cuda:0")),
        ("clean", [], 1, ("clean", "good", "no growth in 1 step; tensors +3.0 MiB on cuda:0")),
        ("clean", [], 0, ("clean", "good", "tensors +3.0 MiB on cuda:0")),
        ("not_judged", [], 12, ("cell", "good", "12 steps, all of them noisy; tensors +3.0 MiB on cuda:0")),
        ("not_judged", [], 0, ("cell", "good", "tensors +3.0 MiB on cuda:0")),
        (
            "leak",
            [leak(bytes_per_step=1024)],
            12,
            ("leak", "bad", "1.0 KiB per step on cuda:0, out of memory in 99 steps"),
        ),
        (
            "leak",
            [leak(bytes_per_microbatch=1024)],
            12,
            ("leak", "bad", "1.0 KiB per micro-batch on cuda:0, out of memory in 99 steps"),
        ),
        (
            "out_of_memory",
            [Finding(kind="out_of_memory", device="cuda:0", bytes=MIB, step=3, phase="forward")],
            12,
            ("out of memory", "bad", "cuda:0 at step 3, in forward: 1.0 MiB asked for"),
        ),
    ],
)
def test_the_headline(verdict: Any, findings: list[Finding], steps: int, said: tuple[str, str, str]) -> None:
    run = run_report(verdict=verdict, findings=findings, steps=steps, judged=JUDGED)
    assert headline(report(run_report=run, runs_out_in=[99 for _ in findings])) == said


def test_a_process_that_is_watched_already_has_no_verdict() -> None:
    assert headline(report(run_report=None)) == ("cell", "good", "tensors +3.0 MiB on cuda:0")
    assert groups_of(report(run_report=None)) == []


def test_steps_until_memory_is_used_up_may_be_unknown() -> None:
    """Growth from run to run comes after the watch's findings, and has none."""
    findings = [leak(bytes_per_step=1024), Finding(kind="leak", device="cpu", holder="other", bytes=MIB)]
    groups = groups_of(report(run_report=run_report(findings=findings), runs_out_in=[99]))
    assert [group.first.holder for group in groups] == ["kept[*]", "other"]


def uses(*changes: tuple[str, int]) -> CellReport:
    return report(
        devices=[DeviceUse(device=device, before=MIB, after=MIB + nbytes) for device, nbytes in changes]
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "tensors as before"),
        ([("cpu", 1023), ("cuda:0", -1023)], "tensors as before"),
        ([("cpu", 1024)], "tensors +1.0 KiB on cpu"),
        ([("cuda:0", -1024), ("cpu", 0), ("cuda:1", MIB)], "tensors -1.0 KiB on cuda:0, +1.0 MiB on cuda:1"),
    ],
)
def test_small_changes_are_none(changes: list[tuple[str, int]], said: str) -> None:
    assert tensors_in_words(uses(*changes)) == said


def test_the_most_in_use_is_of_the_allocator_or_resident() -> None:
    assert [
        peak_in_words(DeviceUse(device=device, before=0, after=0, peak=peak))
        for device, peak in (("cpu", MIB), ("cuda:0", MIB), ("cuda:0", None), ("cpu", 0))
    ] == ["1.0 MiB resident", "1.0 MiB allocated", "n/a", "0 B resident"]


def test_a_change_of_the_same_storages_has_no_number() -> None:
    assert [change_in_words(change("x", MIB, count)) for count in (-3, -1, 0, 1, 2)] == [
        "3 storages, variable", "1 storage, variable", "same storages, variable", "1 storage, variable",
        "2 storages, variable",
    ]  # fmt: skip


def test_what_ipython_keeps() -> None:
    traceback, outputs = kept_by_ipython({"cuda:0": 5 * MIB}, {"cuda:0": 2 * MIB, "cpu": 4 * MIB})
    assert "functions that it ended: 5.0 MiB on cuda:0; `%memtriage_free` releases" in traceback
    assert outputs.startswith("`Out` alone keeps 4.0 MiB on cpu, 2.0 MiB on cuda:0: `%memtriage_free --out`")
    assert kept_by_ipython({}, {}) == []


@pytest.mark.parametrize(
    ("freed", "said"),
    [
        (
            Freed(bytes={"cuda:0": 5 * MIB}, frames=2),
            "freed 5.0 MiB on cuda:0: the traceback's variables (2 functions)",
        ),
        (Freed(bytes={"cpu": MIB}, frames=0), "freed 1.0 MiB on cpu"),
        (
            Freed(bytes={}, frames=1),
            "released the traceback's variables (1 function): no tensor was kept by that alone",
        ),
        (Freed(bytes={}, frames=0), "no tensor was released"),
    ],
)
def test_what_was_freed(freed: Freed, said: str) -> None:
    assert freed_in_words(freed) == said
