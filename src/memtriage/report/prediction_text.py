"""A prediction on the terminal: the peak first, then whose it is, the steps, and what was assumed."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

from memtriage.model.prediction import Prediction
from memtriage.report.page import BULLET, Page
from memtriage.report.text import duration, size

_NAME_WIDTH: Final = 18
_SIZE_WIDTH: Final = 12
_SHARE_WIDTH: Final = 8


def render(prediction: Prediction, console: Console) -> None:
    """Print a prediction."""
    page = Page(console)
    total = prediction.peak_reserved + prediction.outside_allocator
    page.line(
        (f"PEAK {size(prediction.peak_allocated)} allocated", "bold"),
        (f", {size(prediction.peak_reserved)} reserved, in {prediction.peak_phase}", ""),
    )
    page.line(
        (
            f"{size(total)} of the device in all, with {size(prediction.outside_allocator)} outside the "
            f"allocator; predicted in {duration(prediction.seconds)}",
            "dim",
        )
    )
    page.heading("At the peak")
    for owner, count in prediction.by_owner.items():
        _row(page, owner, size(count), f"{count / max(prediction.peak_allocated, 1):.1%}")
    page.heading("Steps", "allocated at most, reserved at most, allocated at the end")
    for number, step in enumerate(prediction.steps, 1):
        _row(
            page,
            f"step {number}",
            size(step.peak_allocated),
            size(step.peak_reserved),
            size(step.end_allocated),
        )
    if prediction.notes:
        page.heading("Assumed")
        for note in prediction.notes:
            page.field("", f"{BULLET}{note}", labels=2)


def _row(page: Page, name: str, first: str, *others: str) -> None:
    cells = f"  {name:<{_NAME_WIDTH}}{first:>{_SIZE_WIDTH}}"
    for other in others:
        cells += f"{other:>{_SIZE_WIDTH if len(others) > 1 else _SHARE_WIDTH}}"
    page.raw(Text(page.plain(cells)))
