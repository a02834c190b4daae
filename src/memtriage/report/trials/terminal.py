"""A comparison on the terminal: the verdict, the table of variants, values, targets, what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from memtriage.model.trials import TargetVerdict, TrialsReport
from memtriage.report.console import GAP, Page, widths
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
        page.table(table, [True, *[False] * len(table[0][1:])])
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


def _table(page: Page, report: TrialsReport) -> list[list[Text]] | None:
    """Return the table's cells, of several lines each; None where the page is too narrow for it."""
    rows = [cells(report, row) for row in report.variants]
    heads = [page.text((cell.column, "dim")) for cell in rows[0]]
    figures = [
        [_lines(page, [page.text(cell.text)], cell.below.splitlines()) for cell in row] for row in rows
    ]
    room = page.width - sum(GAP + width for width in widths([heads, *figures]))
    if room < max(_LEAST_NAME, *(len(trial_counts(row)) for row in report.variants)):
        return None
    table = [[page.text(("variant", "dim")), *heads]]
    for row, beside in zip(report.variants, figures, strict=True):
        name = page.text((row.name, "bold")).wrap(page.console, min(room, _LONGEST_NAME), overflow="fold")
        below = [trial_counts(row), *(["baseline"] if row.baseline else [])]
        table.append([_lines(page, name, below), *beside])
    return table


def _lines(page: Page, first: Iterable[Text], below: Sequence[str]) -> Text:
    return Text("\n").join([*first, *(page.text((line, "dim")) for line in below)])


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
