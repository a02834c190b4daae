"""A notebook cell's report as a fragment of a page: markup and styles alone, no script, nothing to load.

A notebook that is not trusted loses the styles; what is left are headings, lists and tables, in order. Every
name goes in escaped: a holder path may hold whatever a program calls its keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from typing import Final

from memtriage.model.cell import CellReport, Freed, HolderChange, MemoryNow, OutputHold
from memtriage.model.findings import GROWING
from memtriage.model.ledger import Ledger
from memtriage.model.marks import Mark
from memtriage.report import plot
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
    signed,
    title,
    traceback_in_words,
)
from memtriage.report.run.ledger import ledger as drawn_ledger
from memtriage.report.run.words import COURSE_MARKS, FindingGroup, playbook_entry
from memtriage.report.text import UNKNOWN, count, size

_COLORS: Final = re.compile(r":root \{(.*?)\n\}", re.DOTALL)
_VARIABLE: Final = re.compile(r"^\s*(--[\w-]+):\s*(.+?);\s*$", re.MULTILINE)
_CODE: Final = re.compile(r"`([^`]+)`")
_FEWEST_POINTS: Final = 3
_MOST_POINTS: Final = 400
_WIDTH: Final = 1000
_HEIGHT: Final = 100
_FINDINGS: Final = 6
_FIX: Final = ' class="fix"'
_LEDGER_ROWS: Final = 10


def cell_html(report: CellReport) -> str:
    """The report of a cell."""
    word, level, sentence = headline(report)
    run = report.run_report
    parts = [
        f'<div class="head {level}"><b>{_text(word)}</b><span class="what">{_prose(sentence)}</span>'
        f'<span class="cell">{_text(title(report))}</span></div>',
    ]
    groups = groups_of(report)
    if run is not None and groups:
        findings = "".join(_finding(group, group.title(run)) for group in groups[:_FINDINGS])
        rest = len(groups) - _FINDINGS
        parts.append(_part("", findings + (f"<p>and {count(rest, 'more finding')}</p>" if rest > 0 else "")))
    parts += [
        _sentences(
            "Old and new at once",
            [rebinding_in_words(rebinding) for rebinding in report.rebindings],
            "advice",
        ),
        _sentences("Let go of", [] if report.freed is None else [freed_in_words(report.freed)]),
        _sentences(
            "Kept by IPython", traceback_in_words(report.traceback) + outputs_in_words(report.outputs)
        ),
        _devices(report),
        _changes("More than before", report.came),
        _changes("Less than before", report.went),
        _changes("Holds memory now", report.holders, whole=True),
    ]
    if run is not None:
        device = groups[0].first.device if groups else None
        parts.append(_course(run.marks, device))
    parts.append(_sentences("Notes", report.notes))
    return _fragment(parts)


def now_html(now: MemoryNow) -> str:
    """What holds memory now."""
    totals = ", ".join(f"{size(ledger.total)} on {ledger.device}" for ledger in now.ledgers)
    head = f'<div class="head"><b>memory</b><span class="what">{_text(totals)}</span></div>'
    parts = [head, *(_ledger(ledger) for ledger in now.ledgers)]
    parts.append(_changes("Holders of tensors", now.holders, whole=True, more=devices_in_words(now.more)))
    parts.append(
        _sentences("Kept by IPython", traceback_in_words(now.traceback) + outputs_in_words(now.outputs))
    )
    return _fragment(parts)


def freed_html(freed: Freed, left: Sequence[OutputHold]) -> str:
    """What was let go of, and what outputs still hold."""
    level = "good" if freed.bytes else ""
    said = _prose(freed_in_words(freed))
    head = f'<div class="head {level}"><b>free</b><span class="what">{said}</span></div>'
    parts = [head, _changes("Less than before", freed.holders)]
    parts.append(_sentences("Kept by IPython", outputs_in_words(left)))
    return _fragment(parts)


# Parts


def _finding(group: FindingGroup, name: str) -> str:
    first = group.first
    holder = first.holder or (UNKNOWN if first.kind in GROWING else None)
    rows = [
        ("kept alive by", _code(holder)),
        ("also kept alive by", "<br>".join(map(_code, first.also_held_by))),
        ("stored at", _code(first.stored_at)),
        ("allocated at", _code(first.allocated_at)),
        ("detected", _text(group.detected)),
        ("why", _prose(first.mechanism)),
        ("fix", _prose(first.fix)),
        ("evidence", "<br>".join(map(_prose, group.evidence))),
        ("playbook", "" if first.playbook is None else _text(playbook_entry(first.playbook, " · "))),
    ]
    facts = "".join(
        f"<dt>{label}</dt><dd{_FIX if label == 'fix' else ''}>{value}</dd>" for label, value in rows if value
    )
    lesser = "" if group.severe else " lesser"
    return (
        f'<div class="finding{lesser}"><h4><span>{_text(name)}</span><span>{_text(group.amount)}</span></h4>'
        f"<dl>{facts}</dl></div>"
    )


def _devices(report: CellReport) -> str:
    rows = "".join(
        f'<tr><td>{_text(use.device)}</td><td class="n">{size(use.before)}</td>'
        f'<td class="n">{size(use.after)}</td>'
        f'<td class="n {_trend(use.after - use.before)}">{signed(use.after - use.before)}</td>'
        f'<td class="w">{_text(peak_in_words(use))}</td></tr>'
        for use in report.devices
    )
    names = (
        '<tr><th></th><th class="n">before</th><th class="n">after</th><th class="n">change</th>'
        '<th class="w">most in use meanwhile</th></tr>'
    )
    return _part("Tensors", f"<table><thead>{names}</thead><tbody>{rows}</tbody></table>")


def _changes(name: str, changes: Sequence[HolderChange], *, whole: bool = False, more: str = "") -> str:
    if not changes:
        return ""
    rows = "".join(
        f'<tr><td class="n {"" if whole else _trend(change.bytes)}">'
        f"{size(change.bytes) if whole else signed(change.bytes)}</td><td>{_text(change.device)}</td>"
        f'<td class="w">{_code(change.holder)} '
        f'<span class="quiet kind">{_text(change_in_words(change))}</span></td></tr>'
        for change in changes
    )
    rest = f'<p class="quiet">and others: {_text(more)}</p>' if more else ""
    return _part(name, f"<table><tbody>{rows}</tbody></table>{rest}")


def _ledger(one: Ledger) -> str:
    drawn = drawn_ledger(one)
    rows = sorted(drawn["rows"], key=lambda row: -abs(row["bytes"]))
    positive = [row for row in rows if row["bytes"] > 0]
    bar = "".join(
        f'<span class="{"hatched" if row["hatched"] else ""}" title="{_text(_row_name(row))}" '
        f'style="flex:{row["bytes"]} 0 0;background-color:var(--{row["color"]})"></span>'
        for row in positive
    )
    table = "".join(
        f'<tr><td class="n">{size(row["bytes"])}</td><td class="w"><span class="swatch" '
        f'style="background:var(--{row["color"]})"></span>{_text(_row_name(row))} '
        f'<span class="quiet kind">{_text(row["detail"] or "")}</span></td></tr>'
        for row in rows[:_LEDGER_ROWS]
    )
    rest = rows[_LEDGER_ROWS:]
    if rest:
        small = sum(row["bytes"] for row in rest)
        others = count(len(rest), "smaller row")
        table += f'<tr><td class="n">{size(small)}</td><td class="w quiet">{others}</td></tr>'
    return _part(
        one.device, f'<div class="stack">{bar}</div><table><tbody>{table}</tbody></table>', drawn["summary"]
    )


def _row_name(row: dict[str, object]) -> str:
    return f"{row['row']} · {row['owner']}" if row["owner"] else str(row["row"])


def _course(marks: Sequence[Mark], wanted: str | None) -> str:
    """The counters from mark to mark, drawn where they tell something."""
    devices = [mark.device for mark in marks]
    device = wanted if wanted in devices else next((one for one in devices if one != "cpu"), "cpu")
    for name in COURSE_MARKS:
        points = [(mark.step, mark.allocated) for mark in marks if (mark.name, mark.device) == (name, device)]
        values = [value for _, value in points if value is not None]
        if len(values) >= _FEWEST_POINTS:
            break
    else:
        return ""
    if plot.is_flat(values):
        return ""
    low, high = min(values), max(values)
    what = "malloc in use" if device == "cpu" else "allocated"
    ends = f"step {points[0][0]}", f"{size(low)} to {size(high)}", f"step {points[-1][0]}"
    return _part(
        f"{what} on {device}",
        _area(plot.thin(values, _MOST_POINTS), low, high)
        + f'<div class="ends">{"".join(f"<span>{_text(e)}</span>" for e in ends)}</div>',
        f"at each {name}",
    )


def _area(values: Sequence[int], low: int, high: int) -> str:
    across = _WIDTH / max(1, len(values) - 1)
    points = " ".join(
        f"{at * across:.1f},{_HEIGHT - (value - low) / (high - low) * (_HEIGHT - 4) - 2:.1f}"
        for at, value in enumerate(values)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<polygon class="area" points="0,{_HEIGHT} {points} {_WIDTH},{_HEIGHT}"/>'
        f'<polyline class="line" points="{points}"/></svg>'
    )


def _sentences(name: str, sentences: Sequence[str], kind: str = "") -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{_prose(sentence)}</li>" for sentence in sentences)
    return _part(name, f'<ul class="{kind}">{items}</ul>')


# Markup


def _fragment(parts: Iterable[str]) -> str:
    return f'<style>{_styles()}</style>\n<div class="memtriage">{"".join(parts)}</div>'


@lru_cache(maxsize=1)
def _styles() -> str:
    """The colors of `page.css` below `.memtriage`, then `cell.css`, without its comments and line breaks."""
    match = _COLORS.search(asset("page.css"))
    assert match is not None
    colors = "".join(f"{name}:{value};" for name, value in _VARIABLE.findall(match[1]))
    own = re.sub(r"/\*.*?\*/", "", asset("cell.css"), flags=re.DOTALL)
    return f".memtriage{{{colors}}}{' '.join(own.split())}"


def _part(name: str, inside: str, beside: str = "") -> str:
    quiet = f' <span class="quiet">{_text(beside)}</span>' if beside else ""
    head = f"<h4>{_text(name)}{quiet}</h4>" if name else ""
    return f'<div class="part">{head}{inside}</div>'


def _trend(nbytes: int) -> str:
    return "less" if nbytes < 0 else ""


def _text(text: str) -> str:
    return escape(text.encode("utf-8", "replace").decode("utf-8"))


def _code(text: str | None) -> str:
    return "" if text is None else f"<code>{_text(text)}</code>"


def _prose(text: str | None) -> str:
    """A sentence; what stands between backticks is code."""
    return "" if text is None else _CODE.sub(r"<code>\1</code>", _text(text))
