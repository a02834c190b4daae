"""A prediction on the terminal: the peak first, then whose it is, the steps, and what was assumed."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, structs
from rich.console import Console
from rich.text import Text

from memtriage.model.prediction import HOST_PEAK, Against, Horizon, PeakRow, Prediction
from memtriage.model.units import UNKNOWN, count, duration, rank_list, size
from memtriage.report.console import BULLET, Page

_NAME_WIDTH: Final = 20
"""Width of the longest owner's name, `communication buffer`."""
_CLASS_WIDTH: Final = 25
"""Width of the longest class of the host, `batches in shared memory`, and a space."""
_SIZE_WIDTH: Final = 12
_SHARE_WIDTH: Final = 8
_MODULE_WIDTH: Final = 36
_OPERATOR_WIDTH: Final = 32
"""Columns for the blocks and an operator's name such as `aten::native_layer_norm_backward`."""
_COMPARED_WIDTH: Final = 46
_POINTS: Final = 10
"""Steps of a run that are printed; JSON has more."""
_PEAK_ROWS: Final = 30
"""Rows of the table of the peak that are printed; JSON has them all."""
_MARKS: Final = {"backward": "backward", "step": "the optimizer's step"}
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
    if prediction.notes:
        page.heading("Assumed")
        for note in prediction.notes:
            page.field("", f"{BULLET}{note}", labels=2)


def _host(page: Page, title: str, held: dict[str, int]) -> None:
    peak = held[HOST_PEAK]
    page.heading(title, size(peak))
    for kind, part in held.items():
        if kind != HOST_PEAK:
            share = f"{part / max(peak, 1):.1%}"
            page.raw(
                Text(
                    page.plain(f"  {kind:<{_CLASS_WIDTH}}{size(part):>{_SIZE_WIDTH}}{share:>{_SHARE_WIDTH}}")
                )
            )


def _device(page: Page, prediction: Prediction) -> None:
    total = prediction.peak_reserved + prediction.outside_allocator
    page.line(
        (f"PEAK {size(prediction.peak_allocated)} allocated", "bold"),
        (f", {size(prediction.peak_reserved)} reserved, in {prediction.peak_phase}", ""),
    )
    page.line(
        (
            f"{size(total)} of device memory in all, {size(prediction.outside_allocator)} of it outside the "
            f"allocator; predicted in {duration(prediction.seconds)}",
            "dim",
        )
    )
    if prediction.cudnn_trials_bound is not UNSET:
        page.line(
            (f"up to {size(prediction.cudnn_trials_bound)} while cuDNN tries convolutions", "bold"),
            (" (cudnn.benchmark), in the first call of each shape: at most what is free", ""),
        )
    page.heading("At the peak")
    for owner, held in prediction.by_owner.items():
        _row(page, owner, size(held), f"{held / max(prediction.peak_allocated, 1):.1%}")
    if prediction.peak_table is not UNSET:
        _peak_table(page, prediction.peak_table)
    page.heading("Steps", "peak allocated, peak reserved, allocated at the end")
    for number, step in enumerate(prediction.steps, 1):
        _row(
            page,
            f"step {number}",
            size(step.peak_allocated),
            size(step.peak_reserved),
            size(step.end_allocated),
        )
    if prediction.compile_trials is not UNSET:
        _row(page, "trials of kernels", size(prediction.compile_trials))
    if prediction.ranks is not UNSET:
        page.heading("Ranks", "number of ranks, peak allocated, peak reserved")
        for group in prediction.ranks:
            _row(
                page,
                f"rank {rank_list(group.ranks)}",
                f"{len(group.ranks):,}",
                size(group.peak_allocated),
                size(group.peak_reserved),
            )
    if prediction.horizon is not UNSET:
        _horizon(page, prediction.horizon)
    if prediction.against is not UNSET:
        _against(page, prediction.against)


def _horizon(page: Page, horizon: Horizon) -> None:
    shapes = "inputs of one shape" if horizon.shapes == 1 else f"inputs of {horizon.shapes} shapes"
    page.heading(f"Over {horizon.steps:,} steps", shapes)
    page.line((f"  {_ending(horizon)}", "bold"), indent=4)
    page.line(
        (
            f"  without a limit, at most {size(horizon.peak_reserved)} are reserved, first in step "
            f"{horizon.peak_step:,} ({horizon.peak_shape})",
            "",
        ),
        indent=4,
    )
    if horizon.allocated_p50 < horizon.peak_allocated:
        page.line(
            (
                f"  half of the steps allocate at most {size(horizon.allocated_p50)}, 99 % "
                f"{size(horizon.allocated_p99)}, 99.9 % {size(horizon.allocated_p999)}, all "
                f"{size(horizon.peak_allocated)}",
                "",
            ),
            indent=4,
        )
    if horizon.flushed_at is not None:
        returned = f"  from step {horizon.flushed_at:,} cached blocks are returned for lack of memory"
        page.line((returned, ""), indent=4)
    page.heading("Course of the run", "peak allocated, peak reserved, stranded after the step")
    for point in horizon.course[:: max(1, len(horizon.course) // _POINTS)]:
        _row(
            page,
            f"step {point.step:,}",
            size(point.peak_allocated),
            size(point.peak_reserved),
            size(point.stranded),
        )
    if horizon.variants:
        page.heading("With one thing changed", "peak reserved without a limit")
        for variant in horizon.variants:
            full = "fits" if variant.full_at is None else f"full at step {variant.full_at:,}"
            _compared(page, variant.name, f"{size(variant.peak_reserved):>{_SIZE_WIDTH}}  {full}")


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
        figures = f"  {row.owner:<{_NAME_WIDTH}}{size(row.bytes):>{_SIZE_WIDTH}}  "
        module = row.module or NO_MODULE
        if len(figures) + modules + _OPERATOR_WIDTH <= page.width:
            page.raw(Text(page.plain(f"{figures}{module:<{modules}}{made}".rstrip())))
        else:
            page.raw(Text(page.plain(figures.rstrip())))
            page.line((f"      {module}  {made.strip()}".rstrip(), ""), indent=8)
    left = rows[_PEAK_ROWS:]
    if left:
        _row(page, count(len(left), "more row"), size(sum(row.bytes for row in left)))


def _by_module(rows: list[PeakRow]) -> list[PeakRow]:
    """The rows of all lines and phases together, largest first; the operator is that of the largest."""
    sums: dict[tuple[str, str | None], PeakRow] = {}
    for row in rows:
        key = row.owner, row.module
        sums[key] = row if key not in sums else _together(sums[key], row)
    return sorted(sums.values(), key=lambda row: -row.bytes)


def _together(larger: PeakRow, smaller: PeakRow) -> PeakRow:
    return structs.replace(larger, bytes=larger.bytes + smaller.bytes, blocks=larger.blocks + smaller.blocks)


def _against(page: Page, against: Against) -> None:
    page.heading(f"Against the run on {against.device}", "recorded, predicted, difference")
    for mark in against.marks:
        where = (
            f"step {mark.step}" if mark.step == mark.recorded_step else f"step {mark.recorded_step} (last)"
        )
        for name, recorded, predicted in (
            ("allocated", mark.allocated, mark.predicted_allocated),
            ("reserved", mark.reserved, mark.predicted_reserved),
        ):
            _beside(page, f"{where}, end of {_MARKS[mark.name]}, {name}", recorded, predicted)
    if against.owners:
        page.heading("Owner by owner", f"the last ledger; {against.instant} is nearest to it")
        for owner in against.owners:
            _beside(page, owner.owner, owner.recorded, owner.predicted)
    for note in against.notes:
        page.field("", f"{BULLET}{note}", labels=2)


def _beside(page: Page, name: str, recorded: int | None, predicted: int) -> None:
    difference = f"{(predicted - recorded) / recorded:+.1%}" if recorded else UNKNOWN
    _compared(
        page,
        name,
        f"{size(recorded):>{_SIZE_WIDTH}}{size(predicted):>{_SIZE_WIDTH}}{difference:>{_SHARE_WIDTH}}",
    )


def _compared(page: Page, name: str, cells: str) -> None:
    """Print a row with a long name; its cells are on the next line where they do not fit beside it."""
    beside = f"  {name:<{_COMPARED_WIDTH}}"
    if len(beside) + len(cells) <= page.width:
        page.raw(Text(page.plain(beside + cells)))
    else:
        page.line((f"  {name}", ""), indent=4)
        page.raw(Text(page.plain(" " * _NAME_WIDTH + cells)))


def _row(page: Page, name: str, first: str, *others: str) -> None:
    cells = f"  {name:<{_NAME_WIDTH}}{first:>{_SIZE_WIDTH}}"
    for other in others:
        cells += f"{other:>{_SIZE_WIDTH if len(others) > 1 else _SHARE_WIDTH}}"
    page.raw(Text(page.plain(cells)))
