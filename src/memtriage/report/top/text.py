"""`memtriage top` where there is no screen: one plain table, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console

from memtriage.diagnose.ranks.live import LiveView, RankLine
from memtriage.report.console import Page
from memtriage.report.run.terminal import finding_block
from memtriage.report.run.words import notes
from memtriage.report.styles import SEVERITY_STYLES
from memtriage.report.top.words import (
    Column,
    columns_for,
    groups_of,
    headline,
    ordered,
    overview,
    style_of,
    subject,
)

_GAP: Final = 2


def render(view: LiveView, console: Console, column: Column, *, turned: bool = False) -> None:
    """Print where a run stands.

    On a terminal the columns that matter least are left out where there is no room; a file has them all.

    Args:
        view: the run.
        console: where to.
        column: by which ranks are sorted.
        turned: the other way round.
    """
    page = Page(console)
    word, said, weight = headline(view)
    page.verdict(word, SEVERITY_STYLES[weight], said)
    page.line((page.dot.join(subject(view)), "dim"))
    if text := overview(view):
        page.line((text, "dim"))
    page.gap()
    lines = ordered(view.lines, column, turned=turned)
    _table(page, columns_for(view.lines), lines, console.width if console.is_terminal else None)
    if view.report is not None and view.context is not None:
        for number, group in enumerate(groups_of(view), 1):
            finding_block(page, number, group, view.report)
        page.bullets("notes", notes(view.context))


def as_json(view: LiveView) -> dict[str, Any]:
    """Return the same as JSON has it: the ranks' lines, and the findings so far."""
    assert view.report is not None and view.context is not None
    return {
        "schema": 1,
        "run_id": view.run_id,
        "restart": view.restart,
        "argv": view.context.argv,
        "verdict": view.report.verdict,
        "finished": view.finished,
        "steps": view.report.steps,
        "ranks": view.report.ranks,
        "by_rank": view.lines,
        "findings": view.report.findings,
        "ledger": view.report.ledger,
        "exception": view.report.exception,
        "notes": notes(view.context),
    }


def _table(page: Page, columns: Sequence[Column], lines: Sequence[RankLine], width: int | None) -> None:
    cells = {column.key: [page.plain(column.text(line)) for line in lines] for column in columns}
    widths = {c.key: max([len(c.title), *map(len, cells[c.key])]) for c in columns}
    shown = list(columns)
    while width is not None and len(shown) > 1 and _total(shown, widths) > width:
        shown.remove(max(shown, key=lambda column: column.spare))
    page.raw(((" " * _GAP).join(_cell(c, c.title, widths) for c in shown), "dim"))
    for number, line in enumerate(lines):
        texts = ((column, _cell(column, cells[column.key][number], widths)) for column in shown)
        page.raw(*((text + " " * _GAP, style_of(column, line)) for column, text in texts))


def _total(columns: Sequence[Column], widths: dict[str, int]) -> int:
    return sum(widths[column.key] + _GAP for column in columns) - _GAP


def _cell(column: Column, text: str, widths: dict[str, int]) -> str:
    width = widths[column.key]
    return f"{text:<{width}}" if column.left else f"{text:>{width}}"
