"""A run in progress: what each rank's line says, and what was found so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memtriage.diagnose.ranks.live import SILENT_AFTER_S, LiveView, RankLine, live_view, main_mark
from memtriage.model.marks import Mark
from support.live_runs import MIB, NOW, LiveRank


def view_of(directory: Path, at: float = NOW + 12.0) -> LiveView:
    return live_view([directory], at)


def only(directory: Path, at: float = NOW + 12.0) -> RankLine:
    (line,) = view_of(directory, at).lines
    return line


def test_a_rank_in_progress(tmp_path: Path) -> None:
    LiveRank(tmp_path, growth=32 * MIB).steps(10).mark("after refit", 1500 * MIB).ledger(77 * MIB)
    line = only(tmp_path)
    assert (line.rank, line.device, line.step, line.state, line.verdict) == (
        None,
        "cuda:0",
        10,
        "running",
        None,
    )
    assert (line.allocated, line.reserved, line.peak) == (1500 * MIB, 1700 * MIB, 1500 * MIB)
    assert (line.stranded, line.host_rss, line.growth) == (77 * MIB, 3000 * MIB, 32 * MIB)
    assert (line.last_mark, line.age_s) == ("after refit", 2.0)


def test_what_is_not_known_is_none(tmp_path: Path) -> None:
    LiveRank(tmp_path)
    line = only(tmp_path)
    unknown = (line.device, line.allocated, line.peak, line.stranded, line.growth, line.last_mark)
    assert unknown == (None,) * 6


def test_a_gpu_counts_before_the_cpu_however_full(tmp_path: Path) -> None:
    LiveRank(tmp_path).steps(1).mark("step", 10**12, device="cpu")
    assert only(tmp_path).device == "cuda:0"


@pytest.mark.parametrize(
    ("allocated", "fullest"),
    [
        ({"cuda:0": 5, "cuda:1": 7, "cpu": 99}, "cuda:1"),
        ({"cuda:0": 7, "cuda:1": 5}, "cuda:0"),
        ({"cuda:0": None, "cuda:1": 1}, "cuda:1"),
        ({"cpu": 9, "cuda:0": None}, "cuda:0"),
        ({"cpu": None}, "cpu"),
        ({}, None),
    ],
)
def test_the_fullest_gpu_stands_for_its_rank(allocated: dict[str, int | None], fullest: str | None) -> None:
    mark = main_mark(
        Mark(name="step", step=1, microbatch=0, rank=0, time_s=1.0, device=device, allocated=nbytes)
        for device, nbytes in allocated.items()
    )
    assert (None if mark is None else mark.device) == fullest


@pytest.mark.parametrize(("growth", "expected"), [(0, 0), (-MIB, 0), (5 * MIB, 5 * MIB)])
def test_growth_from_step_to_step(tmp_path: Path, growth: int, expected: int) -> None:
    LiveRank(tmp_path, growth=growth).steps(60)
    assert only(tmp_path).growth == expected


@pytest.mark.parametrize(
    ("start", "after", "state"),
    [
        ({}, 12.0, "running"),
        ({"pid": 2**22 + 1}, 12.0, "killed"),
        ({"host": "elsewhere"}, 12.0, "running"),
        ({"host": "elsewhere"}, 11.0 + SILENT_AFTER_S, "silent"),
    ],
)
def test_states(tmp_path: Path, start: dict[str, Any], after: float, state: str) -> None:
    LiveRank(tmp_path, **start).steps(10)
    assert only(tmp_path, NOW + after).state == state


def test_ended_rank_shows_verdict_and_allocator_peak(tmp_path: Path) -> None:
    LiveRank(tmp_path).steps(5).mark("end", 3).end("leak", peak_allocated={"cuda:0": 4000 * MIB})
    line = only(tmp_path)
    assert (line.state, line.verdict, line.peak, line.allocated) == ("ended", "leak", 4000 * MIB, 1000 * MIB)


def test_an_empty_directory_that_fills_later(tmp_path: Path) -> None:
    view = view_of(tmp_path)
    assert view.lines == [] and view.waiting is not None and "no memtriage record" in view.waiting
    rank = LiveRank(tmp_path)
    assert view_of(tmp_path).waiting is None
    rank.steps(3)
    assert view_of(tmp_path).lines[0].step == 3


def test_findings_while_it_runs_and_the_verdict_at_the_end(tmp_path: Path) -> None:
    first = LiveRank(tmp_path, 0, world_size=2).steps(8)
    view = view_of(tmp_path)
    assert view.report is not None and (view.report.verdict, view.finished) == ("not_judged", False)
    assert (view.report.ranks.seen, view.report.ranks.of) == (1, 2)
    first.leak()
    second = LiveRank(tmp_path, 1, world_size=2).steps(8)
    view = view_of(tmp_path)
    assert view.report is not None
    assert [finding.holder for finding in view.report.findings] == ["train.losses[*] -> grad_fn MulBackward0"]
    assert view.report.verdict == "leak"
    first.end("clean")
    second.end("clean")
    view = view_of(tmp_path)
    assert view.report is not None and (view.report.verdict, view.finished) == ("clean", True)


def test_ranks_that_are_all_gone_make_a_killed_run(tmp_path: Path) -> None:
    LiveRank(tmp_path, pid=2**22 + 1).steps(8)
    view = view_of(tmp_path)
    assert view.report is not None and view.report.verdict == "killed" and view.finished


def test_a_restart_is_followed(tmp_path: Path) -> None:
    LiveRank(tmp_path, 0, world_size=1).steps(8).leak()
    assert view_of(tmp_path).report is not None
    LiveRank(tmp_path, 0, world_size=1, restart=1, time=NOW + 5.0).steps(1)
    view = view_of(tmp_path)
    assert view.report is not None
    assert (view.restart, view.report.verdict, view.report.steps) == (1, "not_judged", 1)
