"""The terminal report: verdict first, then findings, then where the memory is, then its course.

Reads on any width from 40 columns up, without colours, without Unicode, and in a file. Holder paths and
allocation sites are never shortened: on a terminal they wrap, in a file they stay on one line so that
they can be searched for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from memtriage.diagnose.merge import RunContext
from memtriage.model.playbook import PLAYBOOK
from memtriage.report import plot
from memtriage.report.page import BULLET, Page, console_for
from memtriage.report.text import KINDS, UNKNOWN, count, duration, rank_list, rate, size

if TYPE_CHECKING:
    from memtriage.model import Finding, FindingKind, LedgerRow, Mark, RunReport, Verdict

__all__ = ["console_for", "render"]

_DETAILED: Final = 90
_CHART_WIDTH: Final = 72
_FLAT: Final = 0.02  # a course within this share of its top is told in words
_BAR_WIDTH: Final = 10
_SIZE_WIDTH: Final = 12
_SHARE_WIDTH: Final = 6
_RANKS_IN_EVIDENCE: Final = 6
_LEDGER_ROWS: Final = 24
_SMALL_SHARE: Final = 0.001

_VERDICTS: Final[dict[Verdict, tuple[str, str]]] = {
    "clean": ("CLEAN", "bold green"),
    "leak": ("LEAK", "bold red"),
    "residue": ("RESIDUE", "bold yellow"),
    "fragmentation": ("FRAGMENTATION", "bold yellow"),
    "out_of_memory": ("OUT OF MEMORY", "bold red"),
    "killed": ("KILLED", "bold red"),
    "error": ("NOT JUDGED", "bold yellow"),
}
_GROWS: Final[frozenset[FindingKind]] = frozenset({"leak", "garbage_cycle"})
_OF_ONE_RANK: Final[frozenset[FindingKind]] = frozenset({"rank_differs", "host_limit"})
"""Kinds whose evidence is another on every rank."""


def render(report: RunReport, console: Console, context: RunContext | None = None) -> None:
    """Print a report.

    Args:
        report: what to print.
        console: where to; `console_for` makes a fitting one.
        context: what else is known of the run (`memtriage.diagnose.merge.context`).
    """
    page = Page(console)
    context = context or RunContext(runs_out_in=[None] * len(report.findings))
    groups = _fold(report.findings, context.runs_out_in)
    _verdict_block(page, report, context, groups)
    for number, group in enumerate(groups, 1):
        _finding_block(page, number, group, report)
    _ledger_blocks(page, report, context.ledger_rank)
    _course_block(page, report, groups, context.ledger_rank)
    _notes_block(page, context)


# Verdict


def _verdict_block(page: Page, report: RunReport, context: RunContext, groups: Sequence[_Group]) -> None:
    word, style = _VERDICTS[report.verdict]
    page.line((word, style), ("  ", ""), (_sentence(report, context, groups), "bold"))
    facts = [
        " ".join(context.argv),
        count(report.steps, "step"),
        "" if context.duration_s is None else duration(context.duration_s),
        f"{report.ranks.seen:,} of {count(report.ranks.of, 'rank')}" if report.ranks.of > 1 else "",
    ]
    page.line((page.dot.join(fact for fact in facts if fact), "dim"))
    if report.exception:
        page.gap()
        page.field("ended by", " ".join(report.exception.split()))


def _sentence(report: RunReport, context: RunContext, groups: Sequence[_Group]) -> str:
    growing = [group for group in groups if group.kind in _GROWS]
    match report.verdict:
        case "clean":
            found = f"no leak, residue or fragmentation found in {count(report.steps, 'step')}"
            return f"{found}; {count(len(groups), 'other finding')}" if groups else found
        case "leak" if growing:
            more = f"; {count(len(growing) - 1, 'more leak')} below" if len(growing) > 1 else ""
            return f"{growing[0].amount} on {growing[0].device}{_until_full(growing[0])}{more}"
        case "residue" | "fragmentation" as kind if named := [
            group for group in groups if group.kind == kind
        ]:
            what = "left behind" if kind == "residue" else "stranded"
            return f"{size(named[0].first.bytes)} {what} on {named[0].device}"
        case "out_of_memory":
            leaked = f"; leaking {growing[0].amount}" if growing else ""
            return (
                _death(next((group.first for group in groups if group.kind == "out_of_memory"), None))
                + leaked
            )
        case "killed":
            who = "the process is"
            if report.ranks.of > 1:
                who = f"{len(context.killed)} of {count(report.ranks.seen, 'rank')} are"
            at_limit = any(group.kind == "host_limit" for group in groups)
            short = "; host memory was at its limit" if at_limit else ""
            return f"{who} gone and wrote no end, after {count(report.steps, 'step')}{short}"
        case "error":
            return "memtriage could not judge this run"
        case _:
            return "see below"


def _until_full(group: _Group) -> str:
    if group.runs_out_in is None:
        return ""
    return f", out of memory in {count(group.runs_out_in, 'step')}"


def _death(finding: Finding | None) -> str:
    if finding is None:
        return "the script died for want of memory"
    when = "" if finding.step is None else f" at step {finding.step}"
    phase = "" if finding.phase is None else f", in {finding.phase}"
    asked = "" if finding.bytes is None else f": {size(finding.bytes)} asked for"
    return f"{finding.device}{when}{phase}{asked}"


# Findings


@dataclass(slots=True)
class _Group:
    """The same finding on one or more ranks; the first is the one with the largest figures."""

    findings: list[Finding]
    runs_out_in: int | None

    @property
    def first(self) -> Finding:
        return self.findings[0]

    @property
    def kind(self) -> FindingKind:
        return self.first.kind

    @property
    def ranks(self) -> list[int]:
        return [finding.rank for finding in self.findings if finding.rank is not None]

    @property
    def device(self) -> str:
        devices = {finding.device for finding in self.findings}
        if len(devices) == 1:
            return self.first.device
        numbers = [int(device.partition(":")[2]) for device in devices if device.partition(":")[2].isdigit()]
        return f"cuda:{rank_list(numbers)}" if len(numbers) == len(devices) else ", ".join(sorted(devices))

    @property
    def amount(self) -> str:
        """The growth, or else the size, over all ranks."""
        first = self.first
        if first.bytes_per_step is not None:
            return _spread([finding.bytes_per_step for finding in self.findings], "step")
        if first.bytes_per_microbatch is not None:
            return _spread([finding.bytes_per_microbatch for finding in self.findings], "micro-batch")
        return _spread([finding.bytes for finding in self.findings], None)


def _spread(amounts: Sequence[int | None], per: str | None) -> str:
    known = [amount for amount in amounts if amount is not None]
    if not known:
        return ""
    low, high = (rate(amount, per) if per else size(amount) for amount in (min(known), max(known)))
    return high if low == high else f"{size(min(known))} to {high}"


def _fold(findings: Sequence[Finding], runs_out_in: Sequence[int | None]) -> list[_Group]:
    """Draw together what is the same on several ranks, in the order of the findings."""
    groups: dict[tuple[object, ...], list[_Group]] = {}
    for finding, steps in zip(findings, runs_out_in, strict=True):
        same = groups.setdefault(_cause(finding), [])
        for group in same:
            if finding.rank not in group.ranks and finding.rank is not None:
                group.findings.append(finding)
                group.runs_out_in = min(
                    (left for left in (group.runs_out_in, steps) if left is not None), default=None
                )
                break
        else:
            same.append(_Group([finding], steps))
    order = {id(finding): position for position, finding in enumerate(findings)}
    return sorted(
        (group for same in groups.values() for group in same), key=lambda group: order[id(group.first)]
    )


def _cause(finding: Finding) -> tuple[object, ...]:
    device = finding.device.partition(":")[0]  # every rank has its own cuda:N
    return (finding.kind, device, finding.holder, finding.allocated_at, finding.phase, finding.mechanism)


def _finding_block(page: Page, number: int, group: _Group, report: RunReport) -> None:
    finding = group.first
    page.gap()
    on = "" if finding.kind == "host_limit" else f" on {group.device}"
    title = f"{KINDS[finding.kind]}{on}{_where(group, report)}"
    page.line((f"{number}  ", "dim"), (title, "bold"), (f"   {group.amount}", _amount_style(group)), indent=3)
    if finding.holder is not None or finding.kind in _GROWS:
        page.field("held by", finding.holder or UNKNOWN, style="cyan", whole=True)
    if finding.also_held_by:
        page.field("also held by", *finding.also_held_by, style="cyan", whole=True)
    if finding.allocated_at is not None:
        page.field("allocated at", finding.allocated_at, whole=True)
    if holds := _holds(page, finding):
        page.field("holds", holds)
    if when := _when(finding):
        page.field("seen", when)
    if finding.mechanism is not None:
        page.field("why", finding.mechanism)
    if finding.fix is not None:
        page.field("fix", finding.fix, style="green")
    if evidence := _evidence(group):
        page.field("evidence", *(BULLET + line for line in evidence))
    if finding.playbook is not None:
        page.field("playbook", _entry(page, finding.playbook))


def _amount_style(group: _Group) -> str:
    return "bold red" if group.kind in _GROWS or group.kind == "out_of_memory" else "bold"


def _where(group: _Group, report: RunReport) -> str:
    if report.ranks.of == 1 or not group.ranks:
        return ""
    if len(group.ranks) == 1:
        return f", rank {group.ranks[0]} only"
    if len(group.ranks) == report.ranks.seen:
        return f", all {report.ranks.seen:,} ranks"
    return f", {len(group.ranks):,} of {report.ranks.seen:,} ranks ({rank_list(group.ranks)})"


def _holds(page: Page, finding: Finding) -> str:
    """Return what has piled up, where the headline gives the growth only."""
    grows = finding.bytes_per_step is not None or finding.bytes_per_microbatch is not None
    parts = []
    if finding.bytes is not None and grows:
        parts.append(size(finding.bytes))
    if finding.bytes_per_step is not None and finding.bytes_per_microbatch is not None:
        parts.append(rate(finding.bytes_per_microbatch, "micro-batch"))
    return page.dot.join(parts)


def _entry(page: Page, name: str) -> str:
    entry = PLAYBOOK.get(name)
    return name if entry is None else f"{name}{page.dot}{entry.subject}"


def _when(finding: Finding) -> str:
    step = "" if finding.step is None else f"at step {finding.step}"
    return step if finding.phase is None else f"{step}, in {finding.phase}".removeprefix(", ")


def _evidence(group: _Group) -> list[str]:
    if len(group.findings) == 1:
        return group.first.evidence
    if group.kind not in _OF_ONE_RANK:
        return [f"rank {group.first.rank}: {line}" for line in group.first.evidence]
    shown = group.findings[:_RANKS_IN_EVIDENCE]
    lines = [f"rank {finding.rank}: {line}" for finding in shown for line in finding.evidence[:1]]
    rest = len(group.findings) - len(shown)
    return [*lines, f"and {count(rest, 'more rank')}"] if rest else lines


# Ledger


def _ledger_blocks(page: Page, report: RunReport, rank: int | None) -> None:
    of = "" if rank is None else f" of rank {rank}"
    shown = {device: _shown(rows) for device, rows in report.ledger.items()}
    names = [_name(page, row) for rows in shown.values() for row in rows]
    widest = page.width - 2 - _SIZE_WIDTH - (0 if page.narrow else 2 + _BAR_WIDTH + 1 + _SHARE_WIDTH)
    width = min(widest, max((name.cell_len for name in names), default=0))
    for device, rows in shown.items():
        total = sum(row.bytes for row in report.ledger[device])
        page.heading(f"{device}{of}", f"{size(total)} in use")
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


def _name(page: Page, row: LedgerRow) -> Text:
    owner = "" if row.owner is None else f"{page.dot}{row.owner}"
    return Text.assemble(page.plain(row.row), (page.plain(owner), "dim"))


def _shown(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Return the rows; of a long ledger the small ones as one, so that the sum stays."""
    total = sum(row.bytes for row in rows)
    if len(rows) <= _LEDGER_ROWS:
        return list(rows)
    small = [row for row in rows if abs(row.bytes) < _SMALL_SHARE * total]
    if len(small) < 2:
        return list(rows)
    large = [row for row in rows if abs(row.bytes) >= _SMALL_SHARE * total]
    return [*large, type(rows[0])(row=f"{len(small)} smaller rows", bytes=sum(row.bytes for row in small))]


def _bar(share: float, ascii_only: bool) -> str:
    cells = min(1.0, max(0.0, share)) * _BAR_WIDTH
    if ascii_only:
        return "#" * round(cells)
    eighths = round(cells * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


# Course


def _course_block(page: Page, report: RunReport, groups: Sequence[_Group], ledger_rank: int | None) -> None:
    device, rank = _of_interest(report, groups, ledger_rank)
    what, marks = _series(report.marks, device, rank)
    values = [value for mark in marks if (value := _figure(mark, device)) is not None]
    if len(values) < 2:
        return
    of = "" if rank is None else f" of rank {rank}"
    page.heading(f"{_COURSE.get(device or '', 'allocated')} on {device}{of}", f"at each {what}")
    low, high = min(values), max(values)
    steps = f"step {marks[0].step} to {marks[-1].step}"
    if high - low < _FLAT * high and not any(group.kind in _GROWS for group in groups):
        page.line((f"  {size(high)}, flat", ""), (f"  {steps}", "dim"))
    else:
        _chart(page, values, steps)


def _chart(page: Page, values: Sequence[int], steps: str) -> None:
    low, high = size(min(values)), size(max(values))
    if low == high:
        high = f"+{size(max(values) - min(values))}"
    label = 2 + max(len(low), len(high))
    lines = plot.area(values, width=min(_CHART_WIDTH, page.width - label - 3), ascii_only=page.ascii_only)
    edge = "|" if page.ascii_only else "│"
    for number, line in enumerate(lines):
        name = high if number == 0 else low if number == len(lines) - 1 else ""
        page.raw(Text(f"{name:>{label}} {edge}{line}"))
    page.raw(Text(f"{'':>{label}}  {steps}", style="dim"))


_COURSE: Final = {"cpu": "malloc in use", "host": "resident"}


def _of_interest(
    report: RunReport, groups: Sequence[_Group], ledger_rank: int | None
) -> tuple[str | None, int | None]:
    """Return the device and rank whose course tells most: the first finding's, or the ledger's."""
    for group in groups:
        if group.kind not in _OF_ONE_RANK or group.kind == "rank_differs":
            return group.first.device, group.first.rank
    device = next((device for device in report.ledger if device != "host"), None)
    return device or (report.marks[0].device if report.marks else None), ledger_rank


def _series(marks: Sequence[Mark], device: str | None, rank: int | None) -> tuple[str, list[Mark]]:
    """Return the marks to draw and their name: steps if there are, else backwards, else all."""
    own = [mark for mark in marks if mark.rank == rank and (mark.device == device or device == "host")]
    for name in ("step", "backward"):
        named = [mark for mark in own if mark.name == name]
        if len(named) > 1:
            return name, named
    return "mark", own


def _figure(mark: Mark, device: str | None) -> int | None:
    return mark.host_rss if device == "host" else mark.allocated


# Notes


def _notes_block(page: Page, context: RunContext) -> None:
    notes = list(context.notes)
    if context.missing:
        ranks = "rank" if len(context.missing) == 1 else "ranks"
        notes.insert(0, f"no record of {ranks} {rank_list(context.missing)}")
    if notes:
        page.heading("notes")
        for note in notes:
            page.line((f"  {BULLET}", "dim"), (note, ""), indent=4)
