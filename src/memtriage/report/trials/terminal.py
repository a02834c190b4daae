"""A comparison on the terminal: the verdict, the table of variants, values, targets, what went wrong."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Final

from rich.console import Console
from rich.text import Text

from memtriage.model.trials import TargetVerdict, TrialsReport, VariantRow
from memtriage.report.console import Page
from memtriage.report.styles import BAD, PLAIN_GOOD, PLAIN_WARN, SEVERITY_STYLES
from memtriage.report.trials.words import (
    VERDICTS,
    cells,
    facts,
    legend,
    remarks,
    sentence,
    target,
    target_result,
    trial_counts,
    values,
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


def render(report: TrialsReport, console: Console) -> None:
    """Print a comparison."""
    page = Page(console)
    word, level = VERDICTS[report.verdict]
    page.verdict(word, SEVERITY_STYLES[level], sentence(report))
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
            for cell in cells(report, row):
                page.field(cell.column, "  ".join([cell.text, *cell.below.splitlines()]), labels=_LABELS)
    _values(page, report)
    _targets(page, report)
    for title, lines in remarks(report).items():
        page.bullets(title, lines)


def _table(page: Page, report: TrialsReport) -> list[Text] | None:
    """Return the table's lines, several a variant; None where the page is too narrow for it."""
    rows = [cells(report, row) for row in report.variants]
    heads = [page.text((cell.column, "dim")) for cell in rows[0]]
    columns = [
        [page.text(cell.text), *(page.text((line, "dim")) for line in cell.below.splitlines())]
        for row in rows
        for cell in row
    ]
    widths = [
        max(text.cell_len for text in (head, *chain.from_iterable(columns[at :: len(heads)])))
        for at, head in enumerate(heads)
    ]
    room = page.width - sum(_GAP + width for width in widths)
    if room < max(_LEAST_NAME, *(len(trial_counts(row)) for row in report.variants)):
        return None
    names = [_name(page, row, min(room, _LONGEST_NAME)) for row in report.variants]
    first = max(text.cell_len for name in names for text in name)
    lines = [_line([page.text(("variant", "dim")), *heads], first, widths)]
    for at, name in enumerate(names):
        figures = columns[at * len(heads) : (at + 1) * len(heads)]
        lines += (
            _line(list(parts), first, widths) for parts in zip_longest(name, *figures, fillvalue=Text())
        )
    return lines


def _line(parts: list[Text], first: int, widths: list[int]) -> Text:
    name, *rest = parts
    line = Text.assemble(name, " " * (first - name.cell_len))
    for text, width in zip(rest, widths, strict=True):
        line = Text.assemble(line, " " * (_GAP + width - text.cell_len), text)
    line.rstrip()
    return line


def _name(page: Page, row: VariantRow, width: int) -> list[Text]:
    name = page.text((row.name, "bold")).wrap(page.console, width, overflow="fold")
    below = [trial_counts(row), *(["baseline"] if row.baseline else [])]
    return [*name, *(page.text((text, "dim")) for text in below)]


def _values(page: Page, report: TrialsReport) -> None:
    finished = [row for row in report.variants if row.finished]
    for name in report.variants[0].values if finished else ():
        page.heading(name, "read from the output")
        for row in finished:
            said = values(row, name, report.baseline)
            page.line((f"  {row.name}: ", "dim"), said, indent=4)


def _targets(page: Page, report: TrialsReport) -> None:
    if not report.targets:
        return
    page.heading("Targets")
    for row in report.targets:
        style = _TARGET_STYLES[row.verdict]
        page.line((f"  {row.verdict:<11}", style), target(row), indent=13)
        page.hanging(" " * 13, (target_result(row), "dim"))
