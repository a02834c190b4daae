"""The terminal report: verdict first, then findings, then where the memory is, then its course.

Reads on any width from 40 columns up, without colors, without Unicode, and in a file. Holder paths and
allocation sites are never shortened: on a terminal they wrap, in a file they stay on one line so that
they can be searched for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import UnsetType
from rich.console import Console
from rich.text import Text

from memtriage.diagnose.ranks.merge import RunContext
from memtriage.model.findings import GROWING, TRAITS
from memtriage.model.units import count, duration, size
from memtriage.report import labels, plot
from memtriage.report.console import Page, console_for
from memtriage.report.findings import FindingGroup, fold
from memtriage.report.run.rank_words import few_ranks, heading, rank_lines
from memtriage.report.run.words import (
    COURSE_MARKS,
    VERDICTS,
    facts,
    largest_rows,
    ledger_rows,
    ledger_summary,
    notes,
    sentence,
)
from memtriage.report.styles import BAD, SEVERITY_STYLES

if TYPE_CHECKING:
    from memtriage.model.findings import Finding
    from memtriage.model.ledger import LedgerRow
    from memtriage.model.marks import Mark
    from memtriage.model.report import RunReport

__all__ = ["console_for", "finding_block", "findings_text", "ledger_blocks", "render"]

_IN_FULL: Final = frozenset({labels.DETECTED, labels.PLAYBOOK})
_IF_ALONE: Final = frozenset({labels.EVIDENCE, labels.ALSO_KEPT_ALIVE_BY})
_OF_OTHERS: Final = (labels.KEPT_ALIVE_BY, labels.STORED_AT, labels.FIX, labels.TO_CONFIRM)
_RANK_LINES: Final = 12
_FINDINGS: Final = 2
_EVIDENCE: Final = 1
_ROWS: Final = 5
_ROWS_OF_SEVERAL: Final = 3
"""What a report has at most, unless all is asked for: of several findings, fewer rows of the ledger."""
_DETAILED: Final = 90
_CHART_WIDTH: Final = 72
_BAR_WIDTH: Final = 10
_SIZE_WIDTH: Final = 12
_SHARE_WIDTH: Final = 6


def render(
    report: RunReport,
    console: Console,
    context: RunContext | None = None,
    *,
    record: Path | None = None,
    at_its_end: bool = False,
) -> None:
    """Print a report.

    Args:
        report: what to print.
        console: where to; `console_for` makes a fitting one.
        context: what else is known of the run (`memtriage.diagnose.ranks.merge.context`).
        record: from where the rest can be shown: then no more is printed than fits on a screen, the first
            findings and the largest rows of the ledger that they are about.
        at_its_end: the program has just printed why it ended. If there is nothing to show, the verdict is
            all that is printed.
    """
    page, full = Page(console), record is None
    context = context or RunContext(runs_out_in=[None] * len(report.findings))
    groups = fold(report.findings, context.runs_out_in)
    word, level = VERDICTS[report.verdict]
    page.verdict(word, SEVERITY_STYLES[level], sentence(report, context, groups))
    if at_its_end and not (groups or report.ledger or report.steps or notes(context)):
        return  # as of a script that failed at once: its own error is on the screen
    page.line((page.dot.join(facts(report, context)), "dim"))
    if report.exception:
        page.gap()
        page.field("ended by", " ".join(report.exception.split()))
    shown = groups if full else groups[:_FINDINGS]
    for number, group in enumerate(shown, 1):
        finding_block(page, number, group, report, full=full, alone=len(groups) < 2)
    if rest := len(groups) - len(shown):
        page.gap()
        page.line((f"and {count(rest, 'more finding')}", "dim"))
    _ranks_block(page, report)
    device, rank = _of_interest(report, groups, context.ledger_rank)
    ledgers = report.ledger if full else _ledger_of(report, device, groups)
    largest = None if full else _ROWS if len(groups) < 2 else _ROWS_OF_SEVERAL
    ledger_blocks(
        page, ledgers, context.ledger_rank, taken=report.ledger_steps, steps=report.steps, largest=largest
    )
    _course_block(page, report, groups, context, device, rank)
    page.bullets("notes", notes(context))
    if not full:
        page.line((f"all evidence and ledgers: memtriage report {record} --full", "dim"), indent=2)


def findings_text(report: RunReport, findings: Sequence[Finding]) -> str:
    """Findings alone, as plain text.

    Args:
        report: the report that they are from.
        findings: which of its findings.
    """
    stream = StringIO()
    page = Page(console_for(stream))
    for number, group in enumerate(fold(findings, [None] * len(findings)), 1):
        finding_block(page, number, group, report)
    return stream.getvalue().strip()


# Run


# Findings


def finding_block(
    page: Page,
    number: int,
    group: FindingGroup,
    report: RunReport,
    *,
    full: bool = True,
    alone: bool = True,
) -> None:
    """Print a finding, under its number.

    Args:
        full: with all evidence, and what repeats the verdict. A brief report says of the first finding what
            it rests on, and of the others where they are and what to do.
        alone: it is the only finding; of several, a brief report has no evidence and no other holders.
    """
    page.gap()
    style = BAD if group.severe else "bold"
    page.line((f"{number}  ", "dim"), (group.title(report), "bold"), (f"   {group.amount}", style), indent=3)
    known = group.facts(page.dot)
    if not full:
        stored = next((fact.values for fact in known if fact.label == labels.STORED_AT), None)
        known = [
            fact._replace(values=fact.values[:_EVIDENCE])
            for fact in known
            if (fact.label not in _IN_FULL if number == 1 else fact.label in _OF_OTHERS)
            and (alone or fact.label not in _IF_ALONE)
            and not (fact.label == labels.ALLOCATED_AT and fact.values == stored)
        ]
    width = max((len(fact.label) for fact in known), default=0) + 4
    for fact in known:
        page.fact(fact, labels=width)


# Ranks


def _ranks_block(page: Page, report: RunReport) -> None:
    lines = rank_lines(report)
    if not lines or isinstance(report.rank_groups, UnsetType):
        return
    page.heading(f"{report.ranks.seen:,} ranks", heading(report.rank_groups))
    for line in lines[:_RANK_LINES]:
        style = "bold" if line.stands_out else ""
        page.line("  ", (f"{line.who}: ", style), line.what, indent=4)
    if rest := lines[_RANK_LINES:]:
        ranks = [rank for line in rest for rank in line.ranks]
        page.line((f"  and {count(len(ranks), 'more rank')} ({few_ranks(ranks)})", "dim"), indent=4)


# Ledger


def ledger_blocks(
    page: Page,
    ledgers: Mapping[str, Sequence[LedgerRow]],
    rank: int | None = None,
    *,
    taken: Mapping[str, int] | None = None,
    steps: int = 0,
    largest: int | None = None,
) -> None:
    """Print ledgers, by device, which are those of `rank`.

    Args:
        taken: the step at which each was taken.
        steps: of the run.
        largest: how many of the largest rows to print, without details; None for all.
    """
    of = "" if rank is None else f" of rank {rank}"
    shown = {
        device: ledger_rows(rows) if largest is None else largest_rows(rows, largest)
        for device, rows in ledgers.items()
    }
    names = [_name(page, row) for rows in shown.values() for row in rows]
    widest = page.width - 2 - _SIZE_WIDTH - (0 if page.narrow else 2 + _BAR_WIDTH + 1 + _SHARE_WIDTH)
    width = min(widest, max((name.cell_len for name in names), default=0))
    for device, rows in shown.items():
        total = sum(row.bytes for row in ledgers[device])
        page.heading(f"{device}{of}", ledger_summary(total, (taken or {}).get(device), steps))
        for row in rows:
            _ledger_row(page, row, total, width)


def _ledger_row(page: Page, row: LedgerRow, total: int, width: int) -> None:
    """Print a row: name, size, and as far as there is room its share as a bar, and its detail."""
    first, *rest = _name(page, row).wrap(page.console, width, overflow="fold")
    first.rstrip()
    first.pad_right(width - first.cell_len)
    cells = Text.assemble("  ", first, f"{size(row.bytes):>{_SIZE_WIDTH}}")
    if not page.narrow:
        share = row.bytes / total if total else 0.0
        cells.append(f"  {_bar(share, page.ascii_only):<{_BAR_WIDTH}}", style="blue")
        cells.append(f" {share:{_SHARE_WIDTH}.1%}", style="dim")
    detail = Text(page.plain(row.detail or ""), style="dim") if page.width >= _DETAILED else Text()
    beside = cells.cell_len + 2 + detail.cell_len <= page.width
    if detail and beside:
        cells = Text.assemble(cells, "  ", detail)
    cells.rstrip()
    page.raw(cells)
    for line in rest:
        page.raw(Text.assemble("    ", line))
    if detail and not beside:
        page.hanging(Text("      "), detail)


def _ledger_of(
    report: RunReport, device: str | None, groups: Sequence[FindingGroup]
) -> dict[str, list[LedgerRow]]:
    """Return the ledger that a report is about: of the job if a process of it grows, else of a device."""
    process = groups[0].first.process if groups else None
    wanted = ("job" if process is not None else device, "host" if device == "cpu" else device, "host")
    name = next((name for name in (*wanted, *report.ledger) if name in report.ledger), None)
    return {} if name is None else {name: report.ledger[name]}


def _name(page: Page, row: LedgerRow) -> Text:
    owner = "" if row.owner is None else f"{page.dot}{row.owner}"
    return Text.assemble(page.plain(row.row), (page.plain(owner), "dim"))


def _bar(share: float, ascii_only: bool) -> str:
    cells = min(1.0, max(0.0, share)) * _BAR_WIDTH
    if ascii_only:
        return "#" * round(cells)
    eighths = round(cells * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


# Course


def _course_block(
    page: Page,
    report: RunReport,
    groups: Sequence[FindingGroup],
    context: RunContext,
    device: str | None,
    rank: int | None,
) -> None:
    process = groups[0].first.process if groups else None
    of_process = context.course_of(process)
    what, marks = ("time", of_process) if of_process else _series(report.marks, device, rank)
    values = [
        value for mark in marks if (value := _figure(mark, device if not of_process else "")) is not None
    ]
    if len(values) < 2:
        return
    of = "" if rank is None else f" of rank {rank}"
    name = f"{_COURSE.get(device or '', 'allocated')} on {device}{of}"
    when = f"{_AT[what]}, {_span(marks[0], marks[-1])}"
    page.heading(f"anonymous memory of {process}" if of_process else name, when)
    if plot.is_flat(values) and not any(group.kind in GROWING for group in groups):
        page.line(f"  {size(max(values))}, flat")
    else:
        _chart(page, values)


def _span(first: Mark, last: Mark) -> str:
    """Return from where to where a course goes: steps, or times where there are none."""
    if first.step != last.step:
        return f"{first.step} to {last.step}"
    return f"{duration(first.time_s)} to {duration(last.time_s)} after the start"


def _chart(page: Page, values: Sequence[int]) -> None:
    low, high = size(min(values)), size(max(values))
    if low == high:
        high = f"+{size(max(values) - min(values))}"
    label = 2 + max(len(low), len(high))
    lines = plot.area(values, width=min(_CHART_WIDTH, page.width - label - 3), ascii_only=page.ascii_only)
    edge = "|" if page.ascii_only else "│"
    for name, line in zip([high, *[""] * (len(lines) - 2), low], lines, strict=True):
        page.raw(f"  {name:>{label - 2}} {edge}{line}")


_AT: Final = {
    "step": "at the end of each step",
    "backward": "at the end of each backward",
    "mark": "at each mark, which is a reading of the counters",
    "time": "over time",
}
_COURSE: Final = {"cpu": "malloc in use, tensors included,", "host": "resident"}


def _of_interest(
    report: RunReport, groups: Sequence[FindingGroup], ledger_rank: int | None
) -> tuple[str | None, int | None]:
    """Return the device and rank to draw: those of the first finding about a course, or the ledger's."""
    for group in groups:
        if TRAITS[group.kind].course:
            return group.first.device, group.first.rank
    device = next((device for device in report.ledger if device not in ("host", "job")), None)
    return device or (report.marks[0].device if report.marks else None), ledger_rank


def _series(marks: Sequence[Mark], device: str | None, rank: int | None) -> tuple[str, list[Mark]]:
    """Return the marks to draw and their name: steps if there are, else backwards, else all."""
    own = [mark for mark in marks if mark.rank == rank and (mark.device == device or device == "host")]
    for name in COURSE_MARKS:
        named = [mark for mark in own if mark.name == name]
        if len(named) > 1:
            return name, named
    return "mark", own


def _figure(mark: Mark, device: str | None) -> int | None:
    return mark.host_rss if device == "host" else mark.allocated
