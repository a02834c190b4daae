"""What a report in a notebook consists of: a head, and parts of kinds, drawn by `text.py` and `html.py`.

The kinds are `findings`, `sentences`, `devices`, `changes` and `ledger`; what else a part has is
what `text.py` and `report/html/assets/cell.html.jinja` read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from memtriage.model.cell import CellReport, Freed, HolderChange, MemoryNow
from memtriage.model.units import size
from memtriage.report.notebook.words import (
    devices_in_words,
    freed_in_words,
    groups_of,
    headline,
    kept_by_ipython,
    title,
)
from memtriage.report.styles import Severity

_FINDINGS: Final = 6

Part = Mapping[str, Any]


class Document(NamedTuple):
    """A report: the head's word, how much it matters, what follows it, and the parts below."""

    word: str
    level: Severity
    sentence: str
    title: str
    parts: list[Part]


def cell_document(report: CellReport) -> Document:
    """Return the report of a cell."""
    run, groups = report.run_report, groups_of(report)
    findings = {"groups": groups[:_FINDINGS], "run": run, "more": len(groups[_FINDINGS:])}
    parts = [
        _part("findings", "", findings if groups else {}),
        _sentences("Released", [] if report.freed is None else [freed_in_words(report.freed)]),
        _sentences("Kept by IPython", kept_by_ipython(report.traceback, report.outputs)),
        _part("devices", "Tensors", {"uses": report.devices}),
        _changes("More than before", report.came),
        _changes("Less than before", report.went),
        _changes("Holds memory now", report.holders, whole=True),
        _sentences("Notes", report.notes),
    ]
    return _document(*headline(report), title(report), parts)


def now_document(now: MemoryNow) -> Document:
    """Return what holds memory now."""
    totals = ", ".join(f"{size(ledger.total)} on {ledger.device}" for ledger in now.ledgers)
    parts = [
        *(_part("ledger", "", {"ledger": ledger}) for ledger in now.ledgers),
        _changes("Holders of tensors", now.holders, whole=True, more=devices_in_words(now.more)),
        _sentences("Kept by IPython", kept_by_ipython(now.traceback, now.outputs)),
    ]
    return _document("memory", "good", totals, "", parts)


def freed_document(freed: Freed) -> Document:
    """Return what was freed."""
    parts = [_changes("Less than before", freed.holders)]
    return _document("free", "good", freed_in_words(freed), "", parts)


def _document(
    word: str, level: Severity, sentence: str, title: str, parts: Sequence[Part | None]
) -> Document:
    return Document(word, level, sentence, title, [part for part in parts if part is not None])


def _part(kind: str, name: str, content: Mapping[str, Any] | None) -> Part | None:
    return {"kind": kind, "name": name, **content} if content else None


def _sentences(name: str, sentences: Sequence[str]) -> Part | None:
    return _part("sentences", name, {"sentences": sentences} if sentences else None)


def _changes(
    name: str, changes: Sequence[HolderChange], *, whole: bool = False, more: str = ""
) -> Part | None:
    return _part("changes", name, {"changes": changes, "whole": whole, "more": more} if changes else None)
