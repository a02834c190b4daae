"""A prediction on the terminal: the peak first, then whose it is, the steps, and what was assumed."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, structs
from rich.console import Console

from memtriage.model.prediction import HOST_PEAK, Horizon, PeakRow, Prediction
from memtriage.model.units import count, duration, rank_list, size
from memtriage.report.console import Page

_CLASS_WIDTH: Final = 25
"""Width of the longest class of the host, `batches in shared memory`, and a space."""
_MODULE_WIDTH: Final = 36
_COMPARED_WIDTH: Final = 46
_POINTS: Final = 10
"""Steps of a run that are printed; JSON has more."""
_PEAK_ROWS: Final = 30
"""Rows of the table of the peak that are printed; JSON has them all."""
NO_MODULE: Final = "(no module)"


def render(prediction: Prediction, console: Console) -> None:
    """Print a prediction."""
    page = Page(console)
    if prediction.peak_reserved or prediction.host is UNSET:
        _device(page, prediction)
    if prediction.host is not UNSET:
        _host(page, "Host memory of the process at its peak", prediction.host)
    if prediction.host_node is not UNSET and prediction.host_node != prediction.host:
        _host(page, "Host memory of the node at its peak", prediction.host_node)
    page.bullets("Assumed", prediction.notes)


def _host(page: Page, title: str, held: dict[str, int]) -> None:
    peak = held[HOST_PEAK]
    page.heading(title, size(peak))
    for kind, part in held.items():
        if kind != HOST_PEAK:
            page.named(kind, size(part), f"{part / max(peak, 1):.1%}", names=_CLASS_WIDTH)


def _device(page: Page, prediction: Prediction) -> None:
    total = prediction.peak_reserved + prediction.outside_allocator
    page.line(
        (f"PEAK {size(prediction.peak_allocated)} allocated", "bold"),
        f", {size(prediction.peak_reserved)} reserved, in {prediction.peak_phase}",
    )
    outside = f"{size(prediction.outside_allocator)} of it outside the allocator"
    took = f"predicted in {duration(prediction.seconds)}"
    page.line((f"{size(total)} of device memory in all, {outside}; {took}", "dim"))
    if prediction.cudnn_trials_bound is not UNSET:
        page.line(
            (f"up to {size(prediction.cudnn_trials_bound)} while cuDNN tries convolutions", "bold"),
            " (cudnn.benchmark), in the first call of each shape: at most what is free",
        )
    page.heading("At the peak")
    for owner, held in prediction.by_owner.items():
        page.named(owner, size(held), f"{held / max(prediction.peak_allocated, 1):.1%}")
    if prediction.peak_table is not UNSET:
        _peak_table(page, prediction.peak_table)
    page.heading("Steps", "peak allocated, peak reserved, allocated at the end")
    for number, step in enumerate(prediction.steps, 1):
        figures = map(size, (step.peak_allocated, step.peak_reserved, step.end_allocated))
        page.named(f"step {number}", *figures)
    if prediction.compile_trials is not UNSET:
        page.named("trials of kernels", size(prediction.compile_trials))
    if prediction.ranks is not UNSET:
        page.heading("Ranks", "number of ranks, peak allocated, peak reserved")
        for group in prediction.ranks:
            peaks = size(group.peak_allocated), size(group.peak_reserved)
            page.named(f"rank {rank_list(group.ranks)}", f"{len(group.ranks):,}", *peaks)
    if prediction.horizon is not UNSET:
        _horizon(page, prediction.horizon)


def _horizon(page: Page, horizon: Horizon) -> None:
    shapes = "inputs of one shape" if horizon.shapes == 1 else f"inputs of {horizon.shapes} shapes"
    page.heading(f"Over {horizon.steps:,} steps", shapes)
    page.line((f"  {_ending(horizon)}", "bold"), indent=4)
    page.line(
        f"  without a limit, at most {size(horizon.peak_reserved)} are reserved, first in step "
        f"{horizon.peak_step:,} ({horizon.peak_shape})",
        indent=4,
    )
    if horizon.allocated_p50 < horizon.peak_allocated:
        page.line(
            f"  half of the steps allocate at most {size(horizon.allocated_p50)}, 99 % "
            f"{size(horizon.allocated_p99)}, 99.9 % {size(horizon.allocated_p999)}, all "
            f"{size(horizon.peak_allocated)}",
            indent=4,
        )
    if horizon.flushed_at is not None:
        page.line(
            f"  from step {horizon.flushed_at:,} cached blocks are returned for lack of memory", indent=4
        )
    page.heading("Course of the run", "peak allocated, peak reserved, stranded after the step")
    for point in horizon.course[:: max(1, len(horizon.course) // _POINTS)]:
        figures = map(size, (point.peak_allocated, point.peak_reserved, point.stranded))
        page.named(f"step {point.step:,}", *figures)
    if horizon.variants:
        page.heading("With one thing changed", "peak reserved without a limit")
        for variant in horizon.variants:
            full = "fits" if variant.full_at is None else f"full at step {variant.full_at:,}"
            page.named(variant.name, size(variant.peak_reserved), names=_COMPARED_WIDTH, words=full)


def _ending(horizon: Horizon) -> str:
    memory = size(horizon.memory)
    if horizon.full_at is None:
        return f"{memory} is enough for all steps"
    where = "before the first step"
    if horizon.full_at:
        where = f"at step {horizon.full_at:,} ({horizon.full_shape})"
    return f"{memory} is full {where}: {horizon.full_operator} requests {size(horizon.full_asked)} more"


def _peak_table(page: Page, rows: list[PeakRow]) -> None:
    page.heading("At the peak, by owner and module", "blocks, the operator that made most")
    rows = _by_module(rows)
    shown = rows[:_PEAK_ROWS]
    modules = min(_MODULE_WIDTH, max((len(row.module or NO_MODULE) for row in shown), default=0))
    for row in shown:
        made = "" if row.operator is None else f"{row.blocks:>6} {row.operator}"
        page.named(row.owner, size(row.bytes), words=f"{row.module or NO_MODULE:<{modules}}{made}")
    if left := rows[_PEAK_ROWS:]:
        page.named(count(len(left), "more row"), size(sum(row.bytes for row in left)))


def _by_module(rows: list[PeakRow]) -> list[PeakRow]:
    """The rows of all lines and phases together, largest first; the operator is that of the largest."""
    sums: dict[tuple[str, str | None], PeakRow] = {}
    for row in rows:
        key = row.owner, row.module
        sums[key] = row if key not in sums else _together(sums[key], row)
    return sorted(sums.values(), key=lambda row: -row.bytes)


def _together(larger: PeakRow, smaller: PeakRow) -> PeakRow:
    return structs.replace(larger, bytes=larger.bytes + smaller.bytes, blocks=larger.blocks + smaller.blocks)
