"""A comparison on the terminal: the verdict, the table of variants, values, targets, what went wrong."""

from __future__ import annotations

from itertools import zip_longest
from typing import Final

from rich.console import Console
from rich.text import Text

from memtriage.model.trials import TargetVerdict, TrialsReport, VariantRow
from memtriage.report.console import BULLET, Page
from memtriage.report.styles import BAD, PLAIN_GOOD, PLAIN_WARN, SEVERITY_STYLES
from memtriage.report.trials.words import (
    TIME,
    VERDICTS,
    differing,
    facts,
    found,
    labels,
    legend,
    peak_metric,
    ratio_spread,
    ratio_value,
    sentence,
    size_spread,
    size_value,
    target,
    target_result,
    time_spread,
    time_value,
    trial_counts,
    values,
    what_is_missing,
)

_TARGET_STYLES: Final[dict[TargetVerdict, str]] = {
    "met": PLAIN_GOOD,
    "missed": BAD,
    "undecided": PLAIN_WARN,
}
_LABELS: Final = 18
_GAP: Final = 2
_LEAST_NAME: Final = 12
_LONGEST_NAME: Final = 26

Cell = tuple[str, str]
"""A figure, and its spread below it."""


def render(report: TrialsReport, console: Console) -> None:
    """Print a comparison."""
    page = Page(console)
    word, level = VERDICTS[report.verdict]
    page.line((word.upper(), SEVERITY_STYLES[level]), (f"  {sentence(report)}", "bold"))
    page.line((f"{report.name}: {'; '.join(facts(report))}", "dim"))
    page.gap()
    table = _table(page, report)
    if table is not None:
        for line in table:
            page.raw(line)
        page.gap()
        page.line((legend(report), "dim"))
    else:
        for row in report.variants:
            page.line(
                (row.name, "bold"), (f"  {trial_counts(row)}{', baseline' if row.baseline else ''}", "dim")
            )
            for name, (value, spread) in _cells(report, row):
                page.field(name, "  ".join([value, *spread.splitlines()]), labels=_LABELS)
    _values(page, report)
    _targets(page, report)
    missing = [line for row in report.variants for line in what_is_missing(row)]
    _lines(page, "Trials without figures", missing)
    _lines(page, "Ranks that differ", [line for row in report.variants for line in differing(report, row)])
    _lines(page, "Found by memtriage run", found(report))
    _lines(page, "notes", report.notes)


def _cells(report: TrialsReport, row: VariantRow) -> list[tuple[str, Cell]]:
    """Return a variant's figures, each with the name of its column."""
    names = labels(report)
    figures = row.figures
    time = figures.get(TIME)
    against = None if time is None else time.against_baseline
    memory = [
        (names["allocated"], figures.get("allocated")),
        (names["reserved"], figures.get("reserved")),
        (names["peak"], figures.get(peak_metric(report))),
    ]
    return [
        ("time per step", (time_value(time), time_spread(time))),
        (
            f"x {report.baseline}",
            (ratio_value(against), ratio_spread(against)),
        ),
        *((name, (size_value(figure), size_spread(figure))) for name, figure in memory),
    ]


def _table(page: Page, report: TrialsReport) -> list[Text] | None:
    """Return the table's lines, several a variant; None where the page is too narrow for it."""
    rows = [_cells(report, row) for row in report.variants]
    heads = [page.plain(name) for name, _ in rows[0]]
    cells = [[_lines_of(page, cell) for _, cell in row] for row in rows]
    widths = [
        max(len(head), *(text.cell_len for row in cells for text in row[column]))
        for column, head in enumerate(heads)
    ]
    room = page.width - sum(_GAP + width for width in widths)
    if room < max(_LEAST_NAME, *(len(trial_counts(row)) for row in report.variants)):
        return None
    names = [_name(page, row, min(room, _LONGEST_NAME)) for row in report.variants]
    first = max(text.cell_len for name in names for text in name)
    lines = [_line([Text("variant"), *map(Text, heads)], first, widths)]
    lines[0].stylize("dim")
    for name, row in zip(names, cells, strict=True):
        for parts in zip_longest(name, *row, fillvalue=Text()):
            lines.append(_line(list(parts), first, widths))
    return lines


def _line(parts: list[Text], first: int, widths: list[int]) -> Text:
    name, *rest = parts
    line = Text.assemble(name, " " * (first - name.cell_len))
    for text, width in zip(rest, widths, strict=True):
        line = Text.assemble(line, " " * (_GAP + width - text.cell_len), text)
    line.rstrip()
    return line


def _name(page: Page, row: VariantRow, width: int) -> list[Text]:
    name = Text(page.plain(row.name), style="bold").wrap(page.console, width, overflow="fold")
    below = [trial_counts(row), *(["baseline"] if row.baseline else [])]
    return [*name, *(Text(text, style="dim") for text in below)]


def _lines_of(page: Page, cell: Cell) -> list[Text]:
    value, spread = cell
    return [Text(page.plain(value)), *(Text(page.plain(line), style="dim") for line in spread.splitlines())]


def _values(page: Page, report: TrialsReport) -> None:
    finished = [row for row in report.variants if row.finished]
    for name in report.variants[0].values if finished else ():
        page.heading(name, "read from the output")
        for row in finished:
            said = values(row, name, report.baseline)
            page.line((f"  {row.name}: ", "dim"), (said, ""), indent=4)


def _targets(page: Page, report: TrialsReport) -> None:
    if not report.targets:
        return
    page.heading("Targets")
    for row in report.targets:
        style = _TARGET_STYLES[row.verdict]
        page.line((f"  {row.verdict:<11}", style), (target(row), ""), indent=13)
        page.hanging(Text(" " * 13), Text(page.plain(target_result(row)), style="dim"))


def _lines(page: Page, title: str, lines: list[str]) -> None:
    if lines:
        page.heading(title)
        for line in lines:
            page.line((f"  {BULLET}", "dim"), (line, ""), indent=4)
