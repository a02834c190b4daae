"""A console with the few forms that reports are made of, on any width from 40 columns up."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import zip_longest
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
GAP: Final = 2
"""Columns between those of a table."""
_LEAST_WIDTH: Final = 40
_NARROW: Final = 60
_WIDEST: Final = 120  # longer lines are hard to read
_LABELS: Final = 16
_NAMES: Final = 20
_FIGURE, _SHARE = 12, 8
_LEAST_VALUE: Final = 44
_HANGING: Final = (BULLET, "-> ", "!! ")
Part = str | tuple[str, str] | Text
"""Words, words and their style, or a text that is printed as it is."""
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

    def text(self, *parts: Part) -> Text:
        """Return parts as one text, each as `plain` returns it."""
        text = Text()
        for part in parts:
            if isinstance(part, Text):
                text.append_text(part)
            else:
                words, style = (part, "") if isinstance(part, str) else part
                text.append(self.plain(words), style)
        return text

    def line(self, *parts: Part, indent: int = 0) -> None:
        """Print a paragraph; its second and later lines are indented."""
        self.hanging("", *parts, hang=indent)

    def verdict(self, word: str, style: str, sentence: str) -> None:
        """Print the line that a report begins with: `LEAK: 311.2 MiB per step on cuda:0`."""
        self.line((f"{word.upper()}:", style), " ", (sentence, "bold"))

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
            self.raw((f"  {label}", "dim"))
        indent = 4 if stacked else labels
        for number, value in enumerate(values):
            first = number == 0 and not stacked
            before = ((f"  {label}" if first else "").ljust(indent), "dim")
            self.hanging(before, (value, style), hang=indent + _hang(value), whole=whole)

    def fact(self, fact: FindingFact, *, labels: int) -> None:
        """Print what is known of a finding; paths stay on one line in a file, to be searched for."""
        values = [BULLET + value for value in fact.values] if fact.form == "list" else fact.values
        whole = fact.form == "path"
        self.field(fact.label, *values, style=_STYLES.get(fact.form, ""), whole=whole, labels=labels)

    def bullets(self, title: str, sentences: Sequence[str]) -> None:
        """Print sentences under a heading, if there are any; without one if the title is empty."""
        if sentences and title:
            self.heading(title)
        for sentence in sentences:
            self.line((f"  {BULLET}", "dim"), sentence, indent=4)

    def named(self, name: str, *figures: str, names: int = _NAMES, words: str = "") -> None:
        """Print a name, figures in columns, and words; what does not fit beside the others is below them.

        Args:
            names: columns for the name.
        """
        cells = _columns(figures)
        beside = f"  {name:<{names}}"
        if len(beside) + len(cells) > self.width:
            self.line(f"  {name}", indent=4)
            beside = " " * _NAMES
        self._with_words(beside + cells, words)

    def sized(self, figures: Sequence[str], *words: Part, whole: bool = False) -> None:
        """Print figures in columns, and words beside them or below.

        Args:
            whole: keep the words on one line in a file.
        """
        self._with_words(f"  {_columns(figures)}", *words, whole=whole)

    def _with_words(self, figures: str, *words: Part, whole: bool = False) -> None:
        text = self.text(*words)
        if self.width - len(figures) - 2 >= min(text.cell_len, _LEAST_VALUE):
            self.hanging(f"{figures}  ", text, whole=whole)
            return
        self.raw(figures)
        if text:
            self.hanging("      ", text, hang=8, whole=whole)

    def numbered(self, number: int, title: Part, *details: Part) -> None:
        """Print an item of a list, and below it what there is to say of it."""
        self.hanging((f"  {number}. ", "bold"), title)
        for detail in details:
            self.hanging("     ", detail)

    def table(self, rows: Sequence[Sequence[Text]], left: Sequence[bool]) -> None:
        """Print cells in columns, each of one or more lines, aligned to the left or to the right."""
        columns = widths(rows)
        for row in rows:
            for parts in zip_longest(*(cell.split() for cell in row), fillvalue=Text()):
                line = Text()
                for part, width, first in zip(parts, columns, left, strict=True):
                    part.align("left" if first else "right", width)
                    line = Text.assemble(line, part, " " * GAP)
                self.raw(line)

    def raw(self, *parts: Part) -> None:
        """Print a line as it is, without the spaces at its end."""
        text = self.text(*parts)
        text.rstrip()
        self.console.print(text, soft_wrap=True)

    def hanging(self, before: Part, *parts: Part, hang: int | None = None, whole: bool = False) -> None:
        """Print a text after another; later lines are `hang` columns in, by default as far as the first."""
        head, text = self.text(before), self.text(*parts)
        hang = head.cell_len if hang is None else hang
        rows = [text]
        if not whole or self.console.is_terminal:
            width = max(10, self.width - max(head.cell_len, hang))
            rows = list(text.wrap(self.console, width, overflow="fold")) or [text]
        for number, row in enumerate(rows):
            line = Text.assemble(head if number == 0 else " " * hang, row)
            line.rstrip()
            self.console.print(line, soft_wrap=True)


def widths(rows: Sequence[Sequence[Text]]) -> list[int]:
    """Return how wide each column of a table is."""
    return [
        max(line.cell_len for cell in column for line in cell.split()) for column in zip(*rows, strict=True)
    ]


def _columns(figures: Sequence[str]) -> str:
    return "".join(f"{figure:>{_SHARE if figure.endswith('%') else _FIGURE}}" for figure in figures)


def _hang(value: str) -> int:
    """Return how far the later lines of a value are indented: as wide as the mark that it begins with."""
    return next((len(mark) for mark in _HANGING if value.startswith(mark)), 0)
