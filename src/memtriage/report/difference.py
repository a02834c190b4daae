"""A difference on the terminal, as Markdown for a comment, and as JUnit for a list of checks."""

from __future__ import annotations

from typing import Final
from xml.sax.saxutils import escape, quoteattr

from rich.console import Console

from memtriage.model.difference import Difference, DifferenceRow, FigureChange
from memtriage.model.units import count, signed, size
from memtriage.report.console import Page

_ROWS: Final = 12
"""Rows that are printed; JSON has them all."""
_SIZE_WIDTH: Final = 11
_MADE_IN: Final = {
    "parameter": "build",
    "buffer": "build",
    "activation": "forward",
    "gradient": "backward",
    "optimizer state": "optimizer",
}
"""The phase that goes without saying."""


def render(difference: Difference, console: Console) -> None:
    """Print the answer, then what makes the difference, then what else differs."""
    page = Page(console)
    page.line((difference.summary, "bold"))
    shown, left, rest = _shown(difference)
    if shown:
        page.heading("What makes the difference", "difference, before -> after")
    for row in shown:
        figures = f"  {_course(row.difference, row.before, row.after)}  "
        page.hanging(figures, page.dot.join(_place(row)))
    if left:
        page.sized([signed(rest)], f"in {count(left, 'more row')}")
    page.heading("In all")
    page.line(f"  {_course(difference.difference, difference.before, difference.after)}  at the peak")
    for name, change in difference.figures.items():
        page.line(f"  {_change(change)}  {name}")
    page.bullets("Also different", difference.suspects)


def markdown(difference: Difference, title: str) -> str:
    """The same for a comment on a pull request."""
    shown, left, rest = _shown(difference)
    lines = [f"**{title}**", "", difference.summary]
    if shown:
        lines += ["", "| difference | before | after | what | where |", "|---:|---:|---:|---|---|"]
    for row in shown:
        owner, *place = _place(row)
        where = ", ".join(f"`{part}`" for part in place).replace("|", "\\|")
        lines.append(
            f"| {signed(row.difference)} | {size(row.before)} | {size(row.after)} | {owner} | {where} |"
        )
    if left:
        lines.append(f"| {signed(rest)} | | | {count(left, 'more row')} | |")
    if difference.suspects:
        lines += ["", "Also different:", "", *(f"- {suspect}" for suspect in difference.suspects)]
    return "\n".join(lines) + "\n"


def junit(difference: Difference, name: str, failure: str | None) -> str:
    """One test case: that the peak is no higher than its limit.

    Args:
        name: of the program.
        failure: why it is; None if it is not.
    """
    failed = "" if failure is None else f"<failure message={quoteattr(failure)}/>"
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<testsuite name="memtriage gate" tests="1" failures="{int(failure is not None)}">'
        f'<testcase classname="memtriage.gate" name={quoteattr(name)}>{failed}'
        f"<system-out>{escape(difference.summary)}</system-out></testcase></testsuite>\n"
    )


def _shown(difference: Difference) -> tuple[list[DifferenceRow], int, int]:
    """The rows to print, how many are left, and what these sum to."""
    left = difference.rows[_ROWS:]
    return difference.rows[:_ROWS], len(left), sum(row.difference for row in left)


def _place(row: DifferenceRow) -> list[str]:
    rank = None if row.rank is None else f"rank {row.rank}"
    phase = row.phase and row.phase != _MADE_IN.get(row.owner) and f"made in {row.phase}"
    return [part for part in (row.owner, row.module, row.site, phase, rank) if part]


def _change(change: FigureChange) -> str:
    by = 0 if change.before is None or change.after is None else change.after - change.before
    return _course(by, change.before, change.after)


def _course(by: int, before: int | None, after: int | None) -> str:
    return f"{signed(by):>{_SIZE_WIDTH}}  {size(before):>{_SIZE_WIDTH}} -> {size(after):>{_SIZE_WIDTH}}"
