"""What the charts of a run draw, of few marks and of very many."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.diagnose.growth.roles import ITSELF
from memtriage.model.evidence import Readings, Role
from memtriage.model.marks import Mark
from memtriage.report.run.course import charts
from memtriage.store.reader import RankRecord
from memtriage.store.records import End
from support.page_data import unpack
from support.runs import ACTIVATIONS, GIB, MIB, WEIGHTS, gpu_rank


def drawn(*ranks: RankRecord, interest: str | None = None) -> list[dict[str, Any]]:
    return charts(ranks, ranks, lambda number, on_host: None, interest)


def cpu_rank(marks: list[tuple[str, int, int | None]], rank: int | None = None) -> RankRecord:
    """A rank with marks (name, step, bytes that malloc has handed out)."""
    record = gpu_rank(rank, steps=0)
    record.marks = [
        Mark(name=name, step=step, microbatch=0, rank=rank, time_s=float(at), device="cpu", allocated=used)
        for at, (name, step, used) in enumerate(marks)
    ]
    return record


def test_each_device_has_a_chart_and_the_host_comes_last() -> None:
    rank = gpu_rank(steps=3)
    others = [
        Mark(name="step", step=step, microbatch=0, rank=None, time_s=step, device=device, allocated=GIB)
        for device in ("cuda:10", "cuda:2")
        for step in (1, 2)
    ]
    rank.marks = others + rank.marks
    assert [chart["title"] for chart in drawn(rank)] == [
        "Memory of cuda:0 over the run",
        "Memory of cuda:2 over the run",
        "Memory of cuda:10 over the run",
        "Host memory over the run",
    ]


def test_processes_that_do_the_same_work_have_a_chart_of_their_memory_together() -> None:
    rank = cpu_rank([("step", 100 * MIB, None)] * 4)
    for worker in range(2):
        role = f"worker {worker} of loader"
        rank.evidence.append(Role(role=role, where="worker", group="workers of loader"))
        means = [10.0 * MIB, 20.0 * MIB, 30.0 * MIB]
        rank.evidence.append(
            Readings(scale="second", counter="cpu", role=role, at=[1.0, 2.0, 3.0], means=means)
        )
    chart = drawn(rank, interest="workers of loader")[0]
    assert chart["title"] == "Memory of the workers of loader over the run"
    assert [measure["name"] for measure in chart["measures"]] == ["anonymous memory"]
    (lane,) = chart["lanes"]
    assert unpack(lane["values"]["allocated"]) == [20 * MIB, 40 * MIB, 60 * MIB]


def test_the_main_process_has_no_second_chart_of_its_memory() -> None:
    rank = cpu_rank([("step", 100 * MIB, 100 * MIB)] * 4)
    before = [chart["title"] for chart in drawn(rank)]
    rank.evidence.append(Role(role=ITSELF, where="main", group=ITSELF))
    rank.evidence.append(
        Readings(scale="second", counter="cpu", role=ITSELF, at=[1.0, 2.0], means=[1.0, 2.0])
    )
    assert [chart["title"] for chart in drawn(rank)] == before == ["Host memory over the run"]


def test_ranks_share_the_chart_of_their_own_gpus() -> None:
    gpu, host = drawn(*(gpu_rank(rank, 4, steps=3) for rank in range(4)))
    assert gpu["title"] == "Memory of cuda:0-3 over the run"
    assert [(lane["rank"], lane["device"]) for lane in gpu["lanes"]] == [(n, f"cuda:{n}") for n in range(4)]
    assert [lane["rank"] for lane in host["lanes"]] == [0, 1, 2, 3]
    assert gpu["band"] is None


def test_a_lane_holds_every_mark_of_a_short_run_with_its_name() -> None:
    gpu, host = drawn(gpu_rank(steps=2, growth=MIB, own_mark="after refit"))
    (lane,) = gpu["lanes"]
    assert [gpu["names"][kind] for kind in unpack(lane["kind"])] == ["backward", "backward", "step"] * 2
    assert unpack(lane["values"]["allocated"])[:3] == [
        WEIGHTS + ACTIVATIONS - GIB,
        WEIGHTS + ACTIVATIONS - 2 * GIB,
        3 * WEIGHTS + MIB,
    ]
    assert gpu["names"][gpu["usual"]] == "step"
    assert lane["left_out"] is None
    assert host["names"] == ["backward", "step", "start"]
    assert [host["names"][often] for often in host["often"]] == ["backward", "step"]


def test_marks_within_a_step_lie_evenly_behind_it() -> None:
    (chart,) = drawn(
        cpu_rank([("start", 0, 1), ("backward", 0, 1), ("step", 1, 1), ("backward", 1, 1), ("x", 1, 1)])
    )
    assert unpack(chart["lanes"][0]["at"]) == [0, 500, 1000, 1333, 1666]
    assert [chart["names"][own] for own in chart["own"]] == ["x"]


def test_unread_figures_are_negative_unread_counters_left_out() -> None:
    (chart,) = drawn(cpu_rank([("step", 1, 5 * MIB), ("step", 2, None), ("step", 3, 7 * MIB)]))
    assert [measure["key"] for measure in chart["measures"]] == ["malloc"]
    assert unpack(chart["lanes"][0]["values"]["malloc"]) == [5 * MIB, -1, 7 * MIB]
    assert chart["compared"] == "malloc"


@pytest.mark.parametrize(
    ("interest", "focus", "title"),
    [("cpu", "malloc", "Host memory"), ("host", "rss", "Host memory"), ("cuda:0", None, "Memory of cuda:0")],
)
def test_the_chart_of_the_first_finding_comes_first_and_shows_its_counter(
    interest: str, focus: str | None, title: str
) -> None:
    made = drawn(gpu_rank(steps=3), interest=interest)
    assert [chart["of_interest"] for chart in made] == [True, False]
    assert [chart["focus"] for chart in made] == [focus, None]
    assert made[0]["title"].startswith(title)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (End(verdict="clean"), None),
        (End(verdict="out_of_memory", exception="OutOfMemoryError"), "out of memory"),
        (End(verdict="clean", exception="ValueError"), "exception"),
    ],
)
def test_a_bad_end_is_marked(end: End, said: str | None) -> None:
    (chart, _) = drawn(gpu_rank(steps=2, end=end))
    assert chart["lanes"][0]["end"] == said


def test_a_killed_rank_is_marked() -> None:
    rank = gpu_rank(steps=2)
    rank.end, rank.alive = None, False
    assert drawn(rank)[0]["lanes"][0]["end"] == "killed"


def test_without_marks_there_is_no_chart() -> None:
    assert drawn(gpu_rank(steps=0), cpu_rank([])) == []


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(0, 4999))
def test_a_long_course_keeps_its_extremes(seed: int, highest: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**40, 5000).tolist()
    values[highest] = 2**41
    marks = [("step" if place % 2 else "backward", place // 2, value) for place, value in enumerate(values)]
    (chart,) = drawn(cpu_rank(marks))
    (lane,) = chart["lanes"]
    kinds, kept = unpack(lane["kind"]), unpack(lane["values"]["malloc"])
    assert len(kept) <= 3000
    assert lane["left_out"].endswith("the highest and the lowest of every stretch")
    for name in ("step", "backward"):
        own = [value for kind, value in zip(kinds, kept, strict=True) if chart["names"][kind] == name]
        all_own = [value for mark, _, value in marks if mark == name]
        assert (min(own), max(own)) == (min(all_own), max(all_own))


def test_names_made_up_for_every_mark_are_drawn_together() -> None:
    (chart,) = drawn(cpu_rank([(f"batch {n} {'x' * 500}", n, n) for n in range(5000)]))
    assert len(chart["names"]) == 60
    assert chart["names"][-1] == "other marks"
    assert max(map(len, chart["names"])) == 80
    assert len(unpack(chart["lanes"][0]["at"])) <= 3000


def test_a_band_spans_the_ranks_that_have_no_lane() -> None:
    ranks = [gpu_rank(number, 40, steps=3, growth=number * MIB) for number in range(40)]
    gpu, host = charts(ranks, ranks[:2], lambda number, on_host: None, None)
    assert [lane["rank"] for lane in gpu["lanes"]] == [0, 1]
    assert gpu["band"]["ranks"] == 40
    assert unpack(gpu["band"]["at"]) == [1000, 2000, 3000]
    low, middle, high = (unpack(edge) for edge in gpu["band"]["values"]["allocated"])
    assert low == [3 * WEIGHTS] * 3
    assert middle == [3 * WEIGHTS + step * 19 * MIB for step in (1, 2, 3)]
    assert high == [3 * WEIGHTS + step * 39 * MIB for step in (1, 2, 3)]
    assert set(host["band"]["values"]) == {"pinned", "malloc", "held", "rss"}


def test_a_figure_of_zero_is_known_to_the_band() -> None:
    ranks = [gpu_rank(number, 3, steps=3, growth=0) for number in range(3)]
    for rank in ranks:
        rank.marks[:] = [msgspec.structs.replace(mark, allocated=mark.step // 2) for mark in rank.marks]
    gpu, _ = charts(ranks, ranks[:1], lambda number, on_host: None, None)
    assert all(unpack(edge) == [0, 1, 1] for edge in gpu["band"]["values"]["allocated"])


def test_the_band_of_a_long_run_keeps_its_extremes() -> None:
    ranks = [cpu_rank([("step", step, 5 * MIB) for step in range(3000)], rank) for rank in range(3)]
    ranks[2].marks[1717].allocated = 9 * MIB
    ranks[1].marks[2000].allocated = 1 * MIB
    (chart,) = charts(ranks, ranks[:1], lambda number, on_host: None, None)
    low, middle, high = (unpack(edge) for edge in chart["band"]["values"]["malloc"])
    assert len(low) == len(high) <= 400
    assert set(middle) == {5 * MIB}
    assert (min(low), max(high)) == (1 * MIB, 9 * MIB)


def test_often_is_what_a_course_has_more_than_once() -> None:
    (chart,) = drawn(
        cpu_rank([("start", 0, 1), ("step", 1, 2), ("x", 1, 3), ("step", 2, 2), ("end", 2, 2), ("end", 2, 2)])
    )
    assert [chart["names"][place] for place in chart["often"]] == ["step"]
    assert [chart["names"][place] for place in chart["own"]] == ["x"]
