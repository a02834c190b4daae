"""A prediction on the terminal."""

from typing import Any

import msgspec
import pytest

from memtriage.model.prediction import (
    Horizon,
    HorizonPoint,
    HorizonVariant,
    PeakRow,
    PredictedStep,
    Prediction,
    RankPeaks,
)
from memtriage.report.prediction_text import render
from support.printed import printed

MIB = 1 << 20
GIB = 1 << 30
MODULE = "model.layers[*].mlp.gate_proj"


def made(**changes: Any) -> Prediction:
    step = PredictedStep(peak_allocated=3 * GIB, peak_reserved=4 * GIB, end_allocated=GIB)
    given: dict[str, Any] = {
        "peak_allocated": 3 * GIB,
        "peak_reserved": 4 * GIB,
        "peak_phase": "backward",
        "by_owner": {"activation": 2 * GIB, "parameter": GIB},
        "outside_allocator": GIB,
        "steps": [step],
        "seconds": 1.5,
        "notes": ["something was assumed"],
        "peak_table": [
            PeakRow(owner="activation", module=MODULE, bytes=2 * GIB, blocks=12, operator="aten::mm"),
            PeakRow(owner="rounding", module=None, bytes=GIB, blocks=0, operator=None),
        ],
    }
    return Prediction(**{**given, **changes})


def shown(prediction: Prediction, width: int) -> str:
    return printed(render, prediction, width=width)


HORIZON = Horizon(
    steps=2000, peak_reserved=9 * GIB, peak_allocated=8 * GIB, allocated_p50=5 * GIB, allocated_p99=6 * GIB,
    allocated_p999=7 * GIB, peak_step=412, peak_shape="input_ids 8x1873",
    full_at=412, full_shape="input_ids 8x1873", full_operator="aten::mm", full_asked=GIB, flushed_at=None,
    memory=8 * GIB, shapes=24, error=None,
    course=[HorizonPoint(step=1, peak_allocated=GIB, peak_reserved=GIB, stranded=0)],
    variants=[HorizonVariant(name="expandable_segments:True", peak_reserved=GIB, full_at=None)],
)  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_the_width(width: int) -> None:
    text = shown(made(horizon=HORIZON), width)
    assert [line for line in text.splitlines() if len(line) > width] == []
    assert "8.0 GiB is full at step 412 (input_ids 8x1873): aten::mm requests 1.0 GiB" in " ".join(
        text.split()
    )


def test_what_comes_of_a_run_is_indented_where_it_wraps() -> None:
    lines = shown(made(horizon=HORIZON), 60).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Over "))
    end = next(number for number, line in enumerate(lines) if line.startswith("Course of the run"))
    wrapped = [line for line in lines[start + 1 : end] if line]
    assert len(wrapped) > 2 and all(line.startswith("  ") for line in wrapped)


def test_a_module_is_below_its_figures_where_they_leave_no_room() -> None:
    wide, narrow = shown(made(), 100), shown(made(), 60)
    assert f"  activation               2.0 GiB  {MODULE}    12 aten::mm\n" in wide
    assert f"  activation               2.0 GiB\n      {MODULE}    12 aten::mm\n" in narrow


@pytest.mark.parametrize("width", [60, 80])
def test_the_host_is_shown_by_class_and_the_node_where_it_differs(width: int) -> None:
    prediction = made()
    prediction.host = {"batches in shared memory": 3 << 30, "libraries": 1 << 30, "peak": 4 << 30}
    prediction.host_node = dict(prediction.host)
    alone = shown(prediction, width)
    assert "Host memory of the process at its peak" in alone
    assert "batches in shared memory      3.0 GiB   75.0%" in alone
    assert "of the node" not in alone
    prediction.host_node = {"libraries": 8 << 30, "peak": 8 << 30}
    assert "Host memory of the node at its peak" in shown(prediction, width)


def test_the_page_with_all_that_a_prediction_may_have() -> None:
    horizon = msgspec.structs.replace(
        HORIZON,
        flushed_at=97,
        variants=[
            *HORIZON.variants,
            HorizonVariant(name="max_split_size_mb:512", peak_reserved=GIB, full_at=1998),
        ],
    )
    prediction = made(
        horizon=horizon,
        cudnn_trials_bound=GIB,
        compile_trials=3 * GIB,
        ranks=[RankPeaks(ranks=[0, 1, 2], peak_allocated=GIB, peak_reserved=2 * GIB)],
    )
    page = " ".join(shown(prediction, 100).split())
    for words in (
        "PEAK 3.0 GiB allocated, 4.0 GiB reserved, in backward 5.0 GiB of device memory in all",
        "up to 1.0 GiB while cuDNN tries convolutions",
        "activation 2.0 GiB 66.7% parameter 1.0 GiB 33.3%",
        "step 1 3.0 GiB 4.0 GiB 1.0 GiB trials of kernels 3.0 GiB",
        "rank 0-2 3 1.0 GiB 2.0 GiB",
        "Over 2,000 steps inputs of 24 shapes 8.0 GiB is full at step 412",
        "half of the steps allocate at most 5.0 GiB, 99 % 6.0 GiB, 99.9 % 7.0 GiB, all 8.0 GiB",
        "from step 97 cached blocks are returned",
        "expandable_segments:True 1.0 GiB fits max_split_size_mb:512 1.0 GiB full at step 1,998",
        "Assumed - something was assumed",
    ):
        assert words in page


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({"full_at": None}, "8.0 GiB is enough for all steps"),
        ({"full_at": 0}, "8.0 GiB is full before the first step: aten::mm requests 1.0 GiB more"),
        ({"shapes": 1}, "Over 2,000 steps  inputs of one shape"),
    ],
)
def test_how_a_run_ends(changes: dict[str, Any], ending: str) -> None:
    text = shown(made(horizon=msgspec.structs.replace(HORIZON, **changes)), 100)
    assert ending in text and "are returned" not in text


def test_steps_that_allocate_the_same_have_no_distribution() -> None:
    same = dict.fromkeys(("allocated_p50", "allocated_p99", "allocated_p999"), HORIZON.peak_allocated)
    assert "of the steps" in shown(made(horizon=HORIZON), 100)
    assert "of the steps" not in shown(made(horizon=msgspec.structs.replace(HORIZON, **same)), 100)


@pytest.mark.parametrize(("rows", "left"), [(30, None), (31, "1 more row"), (32, "2 more rows")])
def test_of_a_long_table_the_rest_is_summed(rows: int, left: str | None) -> None:
    table = [
        PeakRow(owner="activation", module=f"model.{row}", bytes=GIB, blocks=1, operator=None)
        for row in range(rows)
    ]
    text = shown(made(peak_table=table), 100)
    assert sum("model." in line for line in text.splitlines()) == 30
    assert ("more row" in text) is (left is not None)
    if left is not None:
        assert f"  {left:<25}{rows - 30}.0 GiB\n" in text


def test_where_only_the_host_is_predicted_no_device_is_shown() -> None:
    host = {"libraries": GIB, "peak": GIB}
    assert "PEAK" not in shown(made(peak_reserved=0, host=host), 100)
    assert "PEAK" in shown(made(peak_reserved=0), 100)
    assert "PEAK" in shown(made(host=host), 100)
