"""Demands on memory, held against a block of code: what they let pass, and the text of what they do not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memtriage.integrations.memory_check import GROWTH_STEPS, MemoryCheck, MemoryProbe
from memtriage.model.findings import Finding, Verdict
from memtriage.model.judged import Judged
from memtriage.model.report import RankCount, RunReport
from memtriage.observe import cuda
from memtriage.process import active
from memtriage.report.growth_words import judged_again
from memtriage.session.run import Watch
from memtriage.store.reader import read_run

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KEPT: list[Any] = []
FEW: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_kept(only_new_objects: None) -> Iterator[None]:
    yield
    KEPT.clear()
    FEW.clear()
    assert active.session is None


def kib(size: float) -> torch.Tensor:
    return torch.zeros(round(size * KIB), dtype=torch.uint8)


# --- what is demanded ---------------------------------------------------------------------------------------


def test_something_must_be_demanded() -> None:
    with pytest.raises(ValueError, match=r"^nothing is demanded; expected no_growth=True, max_peak=<size>"):
        MemoryCheck()
    with pytest.raises(ValueError, match="max_peak 'much' is not a size"):
        MemoryCheck(max_peak="much")


def test_a_block_that_fails_by_itself_is_not_judged(no_census: None) -> None:
    with pytest.raises(KeyError), MemoryProbe().check(no_growth=True, max_peak=1, no_residue=True):
        KEPT.append(kib(1024))
        raise KeyError


def test_growth_within_a_watched_process_is_refused(no_census: None) -> None:
    first, second = MemoryCheck(no_growth=True), MemoryCheck(no_growth=True)
    first.begin()
    try:
        with pytest.raises(RuntimeError, match="one watch at a time"):
            second.begin()
    finally:
        first.end(judge=False)


# --- what stays ---------------------------------------------------------------------------------------------


def test_all_that_is_not_met_is_said() -> None:
    """A holder may keep a few scalars, and garbage is collected first."""
    KEPT.append(kib(1024))
    with pytest.raises(AssertionError) as raised, MemoryProbe().check(max_peak="16MiB", no_residue=True):
        torch.ones(64 * MIB, dtype=torch.uint8)
        KEPT.extend([kib(32), kib(16), kib(16)])
        FEW.append(kib(64 - 1 / KIB))
        cycle: list[Any] = [kib(1024)]
        cycle.append(cycle)
        del cycle
    peak, stays = str(raised.value).split("\n\n", 1)
    assert peak.startswith("memory: the peak on the process is ")
    words = " ".join(stays.split())
    assert words.startswith("memory stays, but the test must leave none 1 residue on cpu 64.0 KiB ")
    assert f"{__name__}.KEPT[*]" in words
    assert "3 storages that were not there before are alive after it" in words
    assert "release them, or keep them in a fixture, which is set up before the limits apply" in words
    assert "M19" in words and "FEW" not in words


# --- growth -------------------------------------------------------------------------------------------------


def test_a_block_of_enough_steps_passes(no_census: None) -> None:
    memory = MemoryProbe()
    with memory.check(no_growth=True):
        memory.repeat(lambda: None, GROWTH_STEPS)
        FEW.append(kib(1024))  # may stay
    memory.repeat(lambda: KEPT.append(1))  # without a check nothing but the calls
    assert len(KEPT) == 2 * GROWTH_STEPS


def test_backwards_of_one_step_are_as_good_as_steps(no_census: None) -> None:
    layer = torch.nn.Linear(4, 4)
    with MemoryProbe().check(no_growth=True):
        for _ in range(GROWTH_STEPS + 3):
            layer(torch.ones(2, 4)).sum().backward()


def test_too_few_steps_are_no_proof(no_census: None) -> None:
    check = MemoryCheck(no_growth=True)
    check.begin()
    MemoryProbe().repeat(lambda: None, GROWTH_STEPS - 1)
    assert check.end() == [
        f"memory: no_growth cannot be judged: {GROWTH_STEPS - 1} steps are too few, {GROWTH_STEPS} are needed"
        ". Train longer, or repeat what has no optimizer step with the fixture's `memory.repeat(function)`"
    ]


def test_a_model_that_only_the_leak_keeps_after_its_function_is_no_growth(tmp_path: Path) -> None:
    """Each step keeps its input of 256 KiB, and a graph that leads to the model of 4 MiB."""
    kept: list[torch.Tensor] = []

    def train() -> None:
        model = torch.nn.Linear(1024, 1024)
        for _ in range(GROWTH_STEPS + 1):
            kept.append(model(torch.ones(64, 1024).requires_grad_()).sum())
            assert active.session is not None
            active.session.user_step()

    with Watch(tmp_path, quiet=True) as watch:
        train()
    (rank,) = read_run([watch.folder]).ranks
    # Of tests before, malloc may keep freed memory, which is another finding.
    found = [finding for finding in judged_again(rank).findings if finding.kind == "leak"]
    assert [finding.bytes_per_step for finding in found] == [pytest.approx(256 * KIB, rel=0.05)], found


class ReportingWatch:
    """Stands for a watch, with the report that it ends with."""

    report: RunReport | None

    def __init__(self, directory: str, *, quiet: bool) -> None:
        assert Path(directory).is_dir() and quiet

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def reported(verdict: Verdict, *findings: Finding, **reasons: str) -> RunReport:
    return RunReport(
        verdict=verdict, steps=50, findings=list(findings), marks=[], ledger={},
        ranks=RankCount(seen=1, of=1), judged={device: Judged(reason=why) for device, why in reasons.items()},
    )  # fmt: skip


GROWS = Finding(kind="leak", device="cpu", bytes=MIB, certainty="suspected")
IDLE = Finding(kind="residue", device="cpu", bytes=MIB)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (None, "memory: growth could not be judged: the watch came to no report"),
        (reported("clean"), None),
        (reported("clean", IDLE), None),
        (reported("not_judged"), "memory: no_growth cannot be judged: no step was seen. Train longer"),
        (reported("residue", IDLE, cpu="9 are few"), "memory: no_growth cannot be judged: 9 are few. Train"),
        (reported("residue", IDLE), None),
        (
            reported("error"),
            "memory: growth could not be judged; see the notes that `memtriage run` gives for this test",
        ),
        (reported("leak", GROWS), "memory seems to grow, and the test demands that nothing does\n"),
        (
            reported("leak", GROWS, Finding(kind="leak", device="cpu", bytes=MIB, certainty="proven")),
            "memory grows, and the test demands that nothing does\n",
        ),
    ],
)
def test_the_watch_s_report_decides(
    monkeypatch: pytest.MonkeyPatch, report: RunReport | None, said: str | None
) -> None:
    monkeypatch.setattr("memtriage.session.run.Watch", ReportingWatch)
    monkeypatch.setattr(ReportingWatch, "report", report, raising=False)
    check = MemoryCheck(no_growth=True)
    check.begin()
    failures = check.end()
    assert [text[: len(said or "")] for text in failures] == ([] if said is None else [said])


# --- peak ---------------------------------------------------------------------------------------------------


def test_the_peak_is_what_comes_on_top() -> None:
    before = torch.ones(96 * MIB, dtype=torch.uint8)
    check = MemoryCheck(max_peak="64MiB")
    check.begin()
    assert torch.ones(32 * MIB, dtype=torch.uint8).any()
    FEW.append(kib(1024))  # may stay
    assert check.end() == []
    check = MemoryCheck(max_peak="64MiB")
    check.begin()
    assert torch.ones(128 * MIB, dtype=torch.uint8).any()
    (text,) = check.end()
    assert text.startswith("memory: the peak on the process is 12")  # MiB
    assert text.endswith(" the test demands at most 64.0 MiB (67,108,864 bytes)")
    assert before.numel()


def test_the_peak_is_that_of_each_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 has a model before the block, device 1 comes into use in it, and device 2 stays unused."""
    allocated, most = {0: 3 * GIB, 1: 0, 2: 0}, {0: 4 * GIB, 1: GIB + 1, 2: 0}
    restarted: list[int] = []
    monkeypatch.setattr(cuda, "initialized", lambda: True)
    monkeypatch.setattr(cuda, "devices", lambda: range(3))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", restarted.append)
    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", most.__getitem__)
    check = MemoryCheck(max_peak="1GiB")
    check.begin()
    assert restarted == [0, 1, 2]
    most[0] += 1
    assert check.end() == [
        f"memory: the peak on cuda:{device} is 1.0 GiB (1,073,741,825 bytes) above what was in use before; "
        "the test demands at most 1.0 GiB (1,073,741,824 bytes)"
        for device in (0, 1)
    ]
    most[0] -= 1
    most[1] -= 1
    check = MemoryCheck(max_peak="1GiB")
    check.begin()
    assert check.end() == []
    gc.collect()
