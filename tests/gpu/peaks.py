"""Peaks of steps as they are measured and as they are predicted, and by how much they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Steps = list[dict[str, int]]
"""By step, bytes."""
PEAKS = ("peak_allocated", "peak_reserved")


def measured(step: Callable[[], None], count: int) -> Steps:
    """Run some steps on this process's GPU."""
    found = []
    for _ in range(count):
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        found.append(
            {
                "peak_allocated": torch.cuda.max_memory_allocated(),
                "peak_reserved": torch.cuda.max_memory_reserved(),
                "end_allocated": torch.cuda.memory_allocated(),
            }
        )
    return found


def predicted(prediction: Any) -> Steps:
    """The same of a prediction."""
    return [{name: getattr(step, name) for name in (*PEAKS, "end_allocated")} for step in prediction.steps]


def print_differences(what: str, promised: Steps, found: Steps) -> None:
    """Print a line for each step."""
    for number, (each, real) in enumerate(zip(promised, found, strict=True), 1):
        peaks = ", ".join(
            f"{name} {each[name]:,} predicted, {real[name]:,} measured ({each[name] / real[name] - 1:+.2%})"
            for name in PEAKS
        )
        print(f"{what} step {number}: {peaks}", flush=True)
