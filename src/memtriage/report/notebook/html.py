"""A notebook cell's report as a fragment of a page: markup and styles alone, no script, nothing to load.

A notebook that is not trusted loses the styles; what is left are headings, lists and tables, in order. The
markup is in `report/html/assets/cell.html.jinja`, which escapes every value: a holder path may contain
whatever a program calls its keys. Here is what goes into it: one mapping per part, of the kind that its
`kind` names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from memtriage.model.cell import CellReport, Freed, HolderChange, MemoryNow, OutputHold
from memtriage.model.findings import GROWING
from memtriage.model.ledger import Ledger
from memtriage.model.marks import Mark
from memtriage.model.units import signed
from memtriage.report import labels, plot
from memtriage.report.html.shell import asset
from memtriage.report.notebook.words import (
    change_in_words,
    devices_in_words,
    freed_in_words,
    groups_of,
    headline,
    outputs_in_words,
    peak_in_words,
    rebinding_in_words,
    title,
    traceback_in_words,
)
from memtriage.report.run.ledger import ledger as drawn_ledger
from memtriage.report.run.words import COURSE_MARKS, FindingGroup
from memtriage.report.text import UNKNOWN, count, size

if TYPE_CHECKING:
    from jinja2 import Template

_COLORS: Final = re.compile(r":root \{(.*?)\n\}", re.DOTALL)
_VARIABLE: Final = re.compile(r"^\s*(--[\w-]+):\s*(.+?);\s*$", re.MULTILINE)
_CODE: Final = re.compile(r"`([^`]+)`")
_FEWEST_POINTS: Final = 3
_MOST_POINTS: Final = 400
_WIDTH: Final = 1000
_HEIGHT: Final = 100
_FINDINGS: Final = 6
_LEDGER_ROWS: Final = 10

Part = Mapping[str, Any]
"""What the template needs for one part of the report."""


def cell_html(report: CellReport) -> str:
    """Return the report of a cell."""
    word, level, sentence = headline(report)
    run = report.run_report
    groups = groups_of(report)
    parts: list[Part | None] = []
    if run is not None and groups:
        rest = len(groups) - _FINDINGS
        findings = [_finding(group, group.title(run)) for group in groups[:_FINDINGS]]
        more = count(rest, "more finding") if rest > 0 else ""
        parts.append({"kind": "findings", "findings": findings, "more": more})
    parts += [
        _sentences(
            "Old and new at once",
            [rebinding_in_words(rebinding) for rebinding in report.rebindings],
            "advice",
        ),
        _sentences("Released", [] if report.freed is None else [freed_in_words(report.freed)]),
        _sentences(
            "Kept by IPython", traceback_in_words(report.traceback) + outputs_in_words(report.outputs)
        ),
        {"kind": "devices", "name": "Tensors", "uses": report.devices},
        _changes("More than before", report.came),
        _changes("Less than before", report.went),
        _changes("Holds memory now", report.holders, whole=True),
    ]
    if run is not None:
        parts.append(_course(run.marks, groups[0].first.device if groups else None))
    parts.append(_sentences("Notes", report.notes))
    return _rendered(word, sentence, parts, level=level, title=title(report))


def now_html(now: MemoryNow) -> str:
    """Return what holds memory now."""
    totals = ", ".join(f"{size(ledger.total)} on {ledger.device}" for ledger in now.ledgers)
    parts = [
        *(_ledger(ledger) for ledger in now.ledgers),
        _changes("Holders of tensors", now.holders, whole=True, more=devices_in_words(now.more)),
        _sentences("Kept by IPython", traceback_in_words(now.traceback) + outputs_in_words(now.outputs)),
    ]
    return _rendered("memory", totals, parts)


def freed_html(freed: Freed, left: Sequence[OutputHold]) -> str:
    """Return what was freed, and what outputs still hold."""
    parts = [
        _changes("Less than before", freed.holders),
        _sentences("Kept by IPython", outputs_in_words(left)),
    ]
    return _rendered("free", freed_in_words(freed), parts, level="good" if freed.bytes else "")


# Parts


def _finding(group: FindingGroup, name: str) -> dict[str, Any]:
    first = group.first
    holder = first.holder or (UNKNOWN if first.kind in GROWING else None)
    entry = None if first.playbook is None else labels.playbook_entry(first.playbook, " · ")
    return {
        "name": name,
        "amount": group.amount,
        "severe": group.severe,
        "facts": [
            _fact(labels.KEPT_ALIVE_BY, holder, path=True),
            _fact(labels.ALSO_KEPT_ALIVE_BY, *first.also_held_by, path=True),
            _fact(labels.STORED_AT, first.stored_at, path=True),
            _fact(labels.ALLOCATED_AT, first.allocated_at, path=True),
            _fact(labels.DETECTED, group.detected),
            _fact(labels.WHY, first.mechanism),
            _fact(labels.FIX, first.fix),
            _fact(labels.EVIDENCE, *group.evidence),
            _fact(labels.PLAYBOOK, entry),
        ],
    }


def _fact(label: str, *lines: str | None, path: bool = False) -> dict[str, Any]:
    return {"label": label, "lines": [line for line in lines if line], "path": path}


def _changes(
    name: str, changes: Sequence[HolderChange], *, whole: bool = False, more: str = ""
) -> Part | None:
    if not changes:
        return None
    return {"kind": "changes", "name": name, "changes": changes, "whole": whole, "more": more}


def _ledger(ledger: Ledger) -> Part:
    drawn = drawn_ledger(ledger)
    rows = sorted(drawn["rows"], key=lambda row: -abs(row["bytes"]))
    return {
        "kind": "ledger",
        "name": ledger.device,
        "beside": drawn["summary"],
        "rows": [{**row, "name": _row_name(row)} for row in rows],
        "most": _LEDGER_ROWS,
        "smaller": count(len(rows) - _LEDGER_ROWS, "smaller row"),
    }


def _row_name(row: dict[str, object]) -> str:
    return f"{row['row']} · {row['owner']}" if row["owner"] else str(row["row"])


def _course(marks: Sequence[Mark], wanted: str | None) -> Part | None:
    """Return the counters from mark to mark, where they are worth a chart."""
    devices = [mark.device for mark in marks]
    device = wanted if wanted in devices else next((name for name in devices if name != "cpu"), "cpu")
    for name in COURSE_MARKS:
        points = [(mark.step, mark.allocated) for mark in marks if (mark.name, mark.device) == (name, device)]
        values = [value for _, value in points if value is not None]
        if len(values) >= _FEWEST_POINTS:
            break
    else:
        return None
    if plot.is_flat(values):
        return None
    low, high = min(values), max(values)
    what = "malloc in use" if device == "cpu" else "allocated"
    return {
        "kind": "course",
        "name": f"{what} on {device}",
        "beside": f"at each {name}",
        "points": _points(plot.thin(values, _MOST_POINTS), low, high),
        "width": _WIDTH,
        "height": _HEIGHT,
        "ends": [f"step {points[0][0]}", f"{size(low)} to {size(high)}", f"step {points[-1][0]}"],
    }


def _points(values: Sequence[int], low: int, high: int) -> str:
    across = _WIDTH / max(1, len(values) - 1)
    return " ".join(
        f"{at * across:.1f},{_HEIGHT - (value - low) / (high - low) * (_HEIGHT - 4) - 2:.1f}"
        for at, value in enumerate(values)
    )


def _sentences(name: str, sentences: Sequence[str], style: str = "") -> Part | None:
    if not sentences:
        return None
    return {"kind": "sentences", "name": name, "sentences": sentences, "style": style}


# Markup


def _rendered(
    word: str, sentence: str, parts: Iterable[Part | None], *, level: str = "", title: str = ""
) -> str:
    shown = [part for part in parts if part is not None]
    return _template().render(
        word=word, sentence=sentence, parts=shown, level=level, title=title, styles=_styles()
    )


@lru_cache(maxsize=1)
def _template() -> Template:
    from jinja2 import Environment
    from markupsafe import Markup, escape

    def encodable(value: object) -> object:
        """Replace lone surrogates, which a program's names may contain and UTF-8 cannot."""
        if isinstance(value, str) and not isinstance(value, Markup):
            return value.encode("utf-8", "replace").decode("utf-8")
        return value

    def prose(text: str) -> Markup:
        return Markup(_CODE.sub(r"<code>\1</code>", str(escape(encodable(text)))))

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=encodable)
    environment.filters.update(
        prose=prose,
        size=size,
        signed=signed,
        trend=lambda nbytes: "less" if nbytes < 0 else "",
        peak=peak_in_words,
        change=change_in_words,
    )
    return environment.from_string(asset("cell.html.jinja"))


@lru_cache(maxsize=1)
def _styles() -> str:
    """Return the colors of `page.css` below `.memtriage`, then `cell.css`, without its comments."""
    match = _COLORS.search(asset("page.css"))
    assert match is not None
    colors = "".join(f"{name}:{value};" for name, value in _VARIABLE.findall(match[1]))
    own = re.sub(r"/\*.*?\*/", "", asset("cell.css"), flags=re.DOTALL)
    return f".memtriage{{{colors}}}{' '.join(own.split())}"
