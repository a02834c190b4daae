"""A console with the few forms that reports are made of, on any width from 40 columns up."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console
from rich.text import Text

from memtriage.process.messages import printable
from memtriage.report.styles import FIX, HOLDER

if TYPE_CHECKING:
    from memtriage.report.findings import FindingFact

FILE_WIDTH: Final = 100
"""Columns of a report that goes into a file or a pipe."""

BULLET: Final = "- "
_LEAST_WIDTH: Final = 40
_NARROW: Final = 60
_WIDEST: Final = 120  # longer lines are hard to read
_LABELS: Final = 16
_LEAST_VALUE: Final = 44
_HANGING: Final = (BULLET, "-> ", "!! ")
_STYLES: Final = {"path": HOLDER, "fix": FIX}


class _PipedConsole(Console):
    """Leaves it to the command what to do when the reader of a pipe has gone away (`| head`)."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console_for(stream: TextIO) -> Console:
    """Return a console for a stream: plain and `FILE_WIDTH` wide unless it is a terminal.

    `COLUMNS` sets another width, `FORCE_COLOR` asks for colors in files and pipes too, `NO_COLOR` for
    none, whatever else is set.
    """
    columns = os.environ.get("COLUMNS", "")
    asked = max(_LEAST_WIDTH, int(columns)) if columns.isdecimal() else FILE_WIDTH
    width = None if stream.isatty() else asked
    # Inside a notebook rich would put all it prints into the cell's output, whatever stream it was given, and
    # the kernel's environment asks for colors everywhere.
    plain = bool(os.environ.get("NO_COLOR")) or "ipykernel" in sys.modules
    colors = bool(os.environ.get("FORCE_COLOR")) and not plain
    return _PipedConsole(
        file=stream,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        force_jupyter=False,
        force_terminal=stream.isatty() or colors,
    )


class Page:
    """Prints paragraphs, headings and labeled values, wrapped and indented to the console's width.

    Attributes:
        console: where it prints.
        width: columns to fill.
        narrow: too narrow for two columns.
        ascii_only: the stream takes no more than ASCII.
        dot: what stands between short facts on a line.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = min(console.width, _WIDEST)
        self.narrow = self.width < _NARROW
        self.ascii_only = not console.encoding.lower().startswith("utf")
        self.dot = " - " if self.ascii_only else " · "

    def plain(self, text: str) -> str:
        """Return text that cannot move the cursor, and that the stream can encode."""
        shown = printable(text)
        return shown.encode("ascii", "backslashreplace").decode("ascii") if self.ascii_only else shown

    def gap(self) -> None:
        self.console.print()

    def line(self, *parts: tuple[str, str], indent: int = 0) -> None:
        """Print a paragraph of styled parts; its second and later lines are indented."""
        text = Text.assemble(*((self.plain(part), style) for part, style in parts))
        self.hanging(Text(), text, hang=indent)

    def verdict(self, word: str, style: str, sentence: str) -> None:
        """Print the line that a report begins with: `LEAK: 311.2 MiB per step on cuda:0`."""
        self.line((f"{word.upper()}:", style), (" ", ""), (sentence, "bold"))

    def heading(self, title: str, detail: str = "") -> None:
        self.gap()
        self.line((title, "bold"), (f"  {detail}" if detail else "", "dim"), indent=2)

    def field(
        self, label: str, *values: str, style: str = "", whole: bool = False, labels: int = _LABELS
    ) -> None:
        """Print a labeled value, or several below each other; the label above them where they do not fit.

        Args:
            label: what the values are; empty to go on with the field before.
            whole: keep each value on one line in a file.
            labels: columns left of the values.
        """
        widest = max((Text(self.plain(value)).cell_len + _hang(value) for value in values), default=0)
        stacked = self.width < labels + min(widest, _LEAST_VALUE)
        if stacked and label:
            self.raw(Text(f"  {label}", style="dim"))
        indent = 4 if stacked else labels
        for number, value in enumerate(values):
            first = number == 0 and not stacked
            before = Text((f"  {label}" if first else "").ljust(indent), style="dim")
            shown = Text(self.plain(value), style=style)
            self.hanging(before, shown, hang=indent + _hang(value), whole=whole)

    def fact(self, fact: FindingFact, *, labels: int) -> None:
        """Print what is known of a finding; paths stay on one line in a file, to be searched for."""
        values = [BULLET + value for value in fact.values] if fact.form == "list" else fact.values
        whole = fact.form == "path"
        self.field(fact.label, *values, style=_STYLES.get(fact.form, ""), whole=whole, labels=labels)

    def bullets(self, title: str, sentences: Sequence[str]) -> None:
        """Print sentences under a heading, if there are any."""
        if sentences:
            self.heading(title)
        for sentence in sentences:
            self.line((f"  {BULLET}", "dim"), (sentence, ""), indent=4)

    def amount(self, label: str, amount: str, words: str = "", *, labels: int = _LABELS) -> None:
        """Print a labeled size, and words beside it, whatever the width.

        Args:
            label: what has this size.
            amount: the size, aligned to the right.
            words: what there is to say of it; wrapped beside it.
            labels: columns left of the size.
        """
        before = Text.assemble((f"  {label}".ljust(labels), "dim"), f"{amount}  ")
        if words:
            self.hanging(before, Text(self.plain(words)))
        else:
            before.rstrip()
            self.raw(before)

    def raw(self, text: Text) -> None:
        """Print a line as it is."""
        self.console.print(text, soft_wrap=True)

    def hanging(self, before: Text, text: Text, *, hang: int | None = None, whole: bool = False) -> None:
        """Print a text behind another, its second and later lines `hang` columns in (default: below it)."""
        hang = before.cell_len if hang is None else hang
        rows = [text]
        if not whole or self.console.is_terminal:
            width = max(10, self.width - max(before.cell_len, hang))
            rows = list(text.wrap(self.console, width, overflow="fold")) or [text]
        for number, row in enumerate(rows):
            row.rstrip()
            self.raw(Text.assemble(before if number == 0 else " " * hang, row))


def _hang(value: str) -> int:
    """Return how far the later lines of a value are indented: as wide as the mark that it begins with."""
    return next((len(mark) for mark in _HANGING if value.startswith(mark)), 0)
