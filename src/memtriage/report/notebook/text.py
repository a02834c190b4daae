"""A notebook cell's report as plain text, for terminals and wherever no page is shown."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Final

from memtriage.model.cell import CellReport, Freed, HolderChange, MemoryNow, OutputHold
from memtriage.model.units import signed
from memtriage.report.console import BULLET, Page, console_for
from memtriage.report.notebook.words import (
    change_in_words,
    devices_in_words,
    freed_in_words,
    headline,
    outputs_in_words,
    peak_in_words,
    rebinding_in_words,
    title,
    traceback_in_words,
)
from memtriage.report.run.terminal import findings_text
from memtriage.report.run.words import ledger_rows
from memtriage.report.text import size

_SIZE_WIDTH: Final = 12


class _Lines:
    """Collects lines."""

    def __init__(self) -> None:
        self._stream = StringIO()
        self.page = Page(console_for(self._stream))

    def line(self, text: str, indent: int = 0) -> None:
        self.page.line((text, ""), indent=indent)

    def listed(self, title: str, sentences: Sequence[str]) -> None:
        if sentences:
            self.page.heading(title)
            for sentence in sentences:
                self.line(f"  {BULLET}{sentence}", indent=4)

    def raw(self, text: str) -> None:
        self._stream.write(f"{text}\n")

    def text(self) -> str:
        return self._stream.getvalue().rstrip()


def cell_text(report: CellReport) -> str:
    """Return the report of a cell."""
    out = _Lines()
    word, _, sentence = headline(report)
    out.line(f"memtriage  {word.upper()}  {sentence}", indent=2)
    out.line(title(report))
    run = report.run_report
    if run is not None and run.findings:
        out.page.gap()
        out.raw(findings_text(run, run.findings))
    out.page.heading("tensors")
    for use in report.devices:
        change = f"{size(use.before)} -> {size(use.after)}  ({signed(use.after - use.before)})"
        out.raw(f"  {use.device:<8}{change}; most in use meanwhile: {peak_in_words(use)}")
    _changes(out, "more than before", report.came)
    _changes(out, "less than before", report.went)
    out.listed("old and new at once", [rebinding_in_words(rebinding) for rebinding in report.rebindings])
    if report.freed is not None:
        out.listed("released", [freed_in_words(report.freed)])
    out.listed("kept by IPython", traceback_in_words(report.traceback) + outputs_in_words(report.outputs))
    _changes(out, "holds memory now", report.holders, whole=True)
    out.listed("notes", report.notes)
    return out.text()


def now_text(now: MemoryNow) -> str:
    """Return what holds memory now."""
    out = _Lines()
    for ledger in now.ledgers:
        out.page.heading(ledger.device, f"{size(ledger.total)} in use")
        for row in ledger_rows(ledger.rows):
            name = row.row if row.owner is None else f"{row.row}{out.page.dot}{row.owner}"
            out.raw(f"  {size(row.bytes):>{_SIZE_WIDTH}}  {name}")
    _changes(out, "holders of tensors", now.holders, whole=True)
    if now.more:
        out.line(f"  and others: {devices_in_words(now.more)}", indent=4)
    out.listed("kept by IPython", traceback_in_words(now.traceback) + outputs_in_words(now.outputs))
    return out.text().lstrip("\n")


def freed_text(freed: Freed, left: Sequence[OutputHold]) -> str:
    """Return what was released, and what outputs still hold."""
    out = _Lines()
    out.line(f"memtriage  {freed_in_words(freed)}", indent=2)
    _changes(out, "less than before", freed.holders)
    out.listed("kept by IPython", outputs_in_words(left))
    return out.text()


def _changes(out: _Lines, title: str, changes: Sequence[HolderChange], *, whole: bool = False) -> None:
    if not changes:
        return
    out.page.heading(title)
    for change in changes:
        amount = size(change.bytes) if whole else signed(change.bytes)
        where = out.page.plain(change.holder)
        out.raw(f"  {amount:>{_SIZE_WIDTH}}  {change.device:<7} {where}   ({change_in_words(change)})")
