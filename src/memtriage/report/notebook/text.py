"""A report in a notebook as plain text, for terminals and wherever no page is shown."""

from __future__ import annotations

from io import StringIO
from typing import Any, Final

from memtriage.model.units import count, signed, size
from memtriage.report.console import Page, console_for
from memtriage.report.notebook.document import Document, Part
from memtriage.report.notebook.words import change_in_words, peak_in_words
from memtriage.report.run.terminal import finding_block, ledger_blocks


def text(document: Document) -> str:
    """Return a report."""
    stream = StringIO()
    page = Page(console_for(stream))
    page.line(f"memtriage  {document.word.upper()}  {document.sentence}", indent=2)
    if document.title:
        page.line(document.title)
    for part in document.parts:
        _PARTS[part["kind"]](page, part)
    return stream.getvalue().rstrip()


def _findings(page: Page, part: Part) -> None:
    for number, group in enumerate(part["groups"], 1):
        finding_block(page, number, group, part["run"])
    if part["more"]:
        page.line(f"and {count(part['more'], 'more finding')}")


def _devices(page: Page, part: Part) -> None:
    page.heading(part["name"])
    for use in part["uses"]:
        change = f"{size(use.before)} -> {size(use.after)}  ({signed(use.after - use.before)})"
        page.raw(f"  {use.device:<8}{change}; most in use meanwhile: {peak_in_words(use)}")


def _changes(page: Page, part: Part) -> None:
    page.heading(part["name"])
    for change in part["changes"]:
        amount = size(change.bytes) if part["whole"] else signed(change.bytes)
        words = f"{change.device:<7} {change.holder}   ({change_in_words(change)})"
        page.sized([amount], words, whole=True)
    if part["more"]:
        page.line(f"  and others: {part['more']}", indent=4)


_PARTS: Final[dict[str, Any]] = {
    "findings": _findings,
    "sentences": lambda page, part: page.bullets(part["name"], part["sentences"]),
    "devices": _devices,
    "changes": _changes,
    "ledger": lambda page, part: ledger_blocks(page, {part["ledger"].device: part["ledger"].rows}),
}
