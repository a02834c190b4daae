"""A prediction on the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from memtriage.model.prediction import (
    Against,
    ComparedMark,
    Horizon,
    HorizonPoint,
    HorizonVariant,
    PeakRow,
    PredictedStep,
    Prediction,
)
from memtriage.report.prediction_text import render

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
    stream = io.StringIO()
    render(prediction, Console(file=stream, width=width, highlight=False, markup=False, emoji=False))
    return stream.getvalue()


def test_the_peak_comes_first() -> None:
    text = shown(made(), 100)
    assert text.startswith("PEAK 3.0 GiB allocated, 4.0 GiB reserved, in backward\n")
    assert "5.0 GiB of device memory in all, 1.0 GiB of it outside the allocator; predicted in 1.5 s" in text
    assert "something was assumed" in text


MARK = ComparedMark(
    name="step", step=2, recorded_step=40, allocated=GIB, reserved=None, predicted_allocated=GIB,
    predicted_reserved=GIB,
)  # fmt: skip
HORIZON = Horizon(
    steps=2000, peak_reserved=9 * GIB, peak_allocated=8 * GIB, peak_step=412, peak_shape="input_ids 8x1873",
    full_at=412, full_shape="input_ids 8x1873", full_operator="aten::mm", full_asked=GIB, flushed_at=None,
    memory=8 * GIB, shapes=24, error=None,
    course=[HorizonPoint(step=1, peak_allocated=GIB, peak_reserved=GIB, stranded=0)],
    variants=[HorizonVariant(name="expandable_segments:True", peak_reserved=GIB, full_at=None)],
)  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_the_width(width: int) -> None:
    against = Against(device="cuda:0", marks=[MARK], owners=[], instant=None, notes=["a note"])
    text = shown(made(against=against, horizon=HORIZON), width)
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
    assert f"  activation               2.0 GiB\n      {MODULE}  12 aten::mm\n" in narrow


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
