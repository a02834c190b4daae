"""`memtriage top`: a table of the ranks and what was found so far, printed once or over and over; JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import StringIO
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from memtriage.diagnose.ranks.live import LiveView, RankLine
from memtriage.report.console import GAP, Page, widths
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


def render(view: LiveView, console: Console, column: Column) -> None:
    """Print where a run stands.

    On a terminal the columns that matter least are left out where there is no room; a file has them all.

    Args:
        view: the run.
        console: where to.
        column: by which ranks are sorted.
    """
    page = Page(console)
    word, said, weight = headline(view)
    page.verdict(word, SEVERITY_STYLES[weight], said)
    page.line((page.dot.join(subject(view)), "dim"))
    if text := overview(view):
        page.line((text, "dim"))
    page.gap()
    if view.report is not None and view.context is not None:
        lines = ordered(view.lines, column)
        _table(page, columns_for(view.lines), lines, console.width if console.is_terminal else None)
        for number, group in enumerate(groups_of(view), 1):
            finding_block(page, number, group, view.report)
        page.bullets("notes", notes(view.context))


_IDLE: Final = 9
"""Following a run waits this many times as long as reading its record takes: a tenth of a core."""


def follow(look: Callable[[], LiveView], console: Console, column: Column, every_s: float) -> None:
    """Show on a terminal where a run stands, until Ctrl-C.

    Args:
        look: reads the record.
        console: the terminal. Lines below its height are not shown.
        column: by which ranks are sorted.
        every_s: seconds between two looks, or more if the record is large.
    """
    with suppress(KeyboardInterrupt), console.screen() as screen:
        while True:
            begun = time.monotonic()
            stream = StringIO()
            drawn = Console(
                file=stream,
                width=console.width,
                force_terminal=True,
                color_system="standard" if console.color_system else None,
                highlight=False,
            )
            render(look(), drawn, column)
            screen.update(Text.from_ansi(stream.getvalue()))
            time.sleep(max(every_s, _IDLE * (time.monotonic() - begun)))


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
    shown = list(columns)
    while True:
        heads = [page.text((column.title, "dim")) for column in shown]
        cells = [
            [page.text((column.text(line), style_of(column, line))) for column in shown] for line in lines
        ]
        wide = sum(each + GAP for each in widths([heads, *cells])) - GAP
        if width is None or len(shown) == 1 or wide <= width:
            break
        shown.remove(max(shown, key=lambda column: column.spare))
    page.table([heads, *cells], [column.left for column in shown])
