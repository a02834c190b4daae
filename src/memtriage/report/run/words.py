"""What reports of a run say on paper, screen or page: verdict, findings drawn together, ledger rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from memtriage.diagnose.ranks.merge import RunContext
from memtriage.diagnose.verdict import reasons_not_judged
from memtriage.model.findings import GROWING
from memtriage.model.units import (
    count,
    devices_in_words,
    duration,
    is_process,
    processes_in_words,
    ranks_in_words,
    rate,
    size,
    work_of,
)
from memtriage.report.findings import FindingGroup
from memtriage.report.labels import KINDS
from memtriage.report.styles import Severity

if TYPE_CHECKING:
    from memtriage.model.findings import Verdict
    from memtriage.model.judged import Judged
    from memtriage.model.ledger import LedgerRow
    from memtriage.model.report import RunReport


VERDICTS: Final[dict[Verdict, tuple[str, Severity]]] = {
    "clean": ("clean", "good"),
    "leak": ("leak", "bad"),
    "residue": ("residue", "warn"),
    "fragmentation": ("fragmentation", "warn"),
    "out_of_memory": ("out of memory", "bad"),
    "killed": ("killed", "bad"),
    "not_judged": ("not judged", "warn"),
    "error": ("error", "warn"),
}
"""Each verdict in words."""

COURSE_MARKS: Final = ("step", "backward")
"""Marks whose course shows most, the best first."""

_SMALL_SHARE: Final = 0.01
_WORTH_ACTING: Final = 3
"""Findings that the verdict's line names where the verdict is about none."""


def sentence(report: RunReport, context: RunContext, groups: Sequence[FindingGroup]) -> str:
    """Return what stands behind the verdict's word."""
    growing = [group for group in groups if group.kind in GROWING and not group.suspected]
    notes = [judged.note for judged in report.judged.values() if judged.note is not None]
    match report.verdict:
        case "clean":
            return "; ".join([_limits(report, context), *notes, *_worth_acting(groups)])
        case "not_judged":
            return "; ".join([*_not_judged(report, context), *notes, *_worth_acting(groups)])
        case "leak" if growing:
            more = f"; {count(len(growing) - 1, 'more leak')} below" if len(growing) > 1 else ""
            return f"{growing[0].amount}{growing[0].place}{_until_full(growing[0])}{more}"
        case "residue" | "fragmentation" as kind if named := [
            group for group in groups if group.kind == kind
        ]:
            what = "not released" if kind == "residue" else "reserved beyond the peak"
            return f"{size(named[0].first.bytes)} {what} on {named[0].device}"
        case "out_of_memory":
            leaked = f"; leaking {growing[0].amount}" if growing else ""
            return _death(groups) + leaked
        case "killed":
            who = "the process is"
            if report.ranks.of > 1:
                who = f"{len(context.killed)} of {count(report.ranks.seen, 'rank')} are"
            at_limit = any(group.kind == "host_limit" for group in groups)
            short = "; host memory was at its limit" if at_limit else ""
            return f"{who} gone without writing an end, after {count(report.steps, 'step')}{short}"
        case "error":
            return "memtriage could not judge this run"
        case _:
            return "see below"


def nothing_found(report: RunReport) -> str:
    """Return what a run is said to be free of, where no detection limit is known."""
    return f"no leak, residue or fragmentation found in {count(report.steps, 'step')}"


def stated_limit(judged: Mapping[str, Judged], *, steps: int, seconds: float | None) -> str | None:
    """Return how small a leak would have been detected, and in how long a run; None if nothing was judged.

    Args:
        judged: what the judgment of growth is based on, by device.
        steps: optimizer steps of the run.
        seconds: how long it was watched; None if unknown.
    """
    alike: dict[str, list[str]] = {}
    for name, judgment in judged.items():
        if judgment.detection_limit is not None:
            alike.setdefault(work_of(name), []).append(name)
    devices: dict[str, list[str]] = {}
    for names in alike.values():  # of processes that do the same work, the highest limit
        limits = [limit for name in names if (limit := judged[name].detection_limit) is not None]
        most = max(limits, key=lambda limit: limit.bytes)
        devices.setdefault(rate(most.bytes, most.per), []).extend(names)
    if not devices:
        return None
    stated = " and ".join(f"{limit} {_on(names)}" for limit, names in devices.items())
    first = next(judgment for judgment in judged.values() if judgment.detection_limit is not None)
    if first.scale == "step":
        rests_on = count(steps, "step")
    elif first.scale == "microbatch":
        rests_on = count(first.points, "backward")
    else:
        rests_on = count(first.points, "reading") if seconds is None else duration(seconds)
    return f"no growth above {stated} in {rests_on}"


def _on(names: Sequence[str]) -> str:
    """Return devices or processes in words, after `on` or `in`."""
    processes = [name for name in names if is_process(name)]
    devices = [name for name in names if not is_process(name)]
    parts = [f"on {devices_in_words(devices)}"] if devices else []
    return " and ".join([*parts, *([f"in {processes_in_words(processes)}"] if processes else [])])


def _limits(report: RunReport, context: RunContext) -> str:
    """Return how small a leak would have been found, and in how long a run."""
    known = stated_limit(report.judged, steps=report.steps, seconds=context.duration_s)
    return nothing_found(report) if known is None else known


def _not_judged(report: RunReport, context: RunContext) -> list[str]:
    """Return what is suspected, why growth could not be judged, or which ranks say nothing of it."""
    lines = reasons_not_judged(report.findings, report.judged)
    if context.running:
        who = "the run" if report.ranks.of == 1 else ranks_in_words(context.running)
        lines.append(f"{who} had not finished")
    if context.killed:
        lines.append(f"{ranks_in_words(context.killed)} wrote no end")
    if context.missing:
        lines.append(_no_record(context))
    return lines or ["growth could not be judged"]


def _worth_acting(groups: Sequence[FindingGroup]) -> list[str]:
    """Return what needs action and no verdict is about, e.g. `workers un-share memory: 2.0 GiB`."""
    parts = [
        f"{KINDS[group.kind]}{': ' if group.amount else ''}{group.amount}"
        for group in groups
        if not group.suspected
    ]
    for each in (group.first.projection for group in groups if group.first.ahead):
        if each is not None:
            when = "at the longest batch" if each.step is None else f"at step {each.step:,}"
            parts.append(f"{each.device} will be full {when}")
    rest = parts[_WORTH_ACTING:]
    return parts[:_WORTH_ACTING] + ([f"{count(len(rest), 'more finding')} below"] if rest else [])


def _until_full(group: FindingGroup) -> str:
    if group.runs_out_in is None:
        return ""
    of = group.first.projection
    by = "" if of is None or of.shares is None else f": {of.in_shares}"
    return f", out of memory in {count(group.runs_out_in, 'step')}{by}"


def _death(groups: Sequence[FindingGroup]) -> str:
    died = (group.first for group in groups if group.kind == "out_of_memory" and not group.first.ahead)
    finding = next(died, None)
    if finding is None:
        return "the script died for lack of memory"
    when = "" if finding.step is None else f" at step {finding.step}"
    phase = "" if finding.phase is None else f", in {finding.phase}"
    asked = "" if finding.bytes is None else f": {size(finding.bytes)} asked for"
    return f"{finding.device}{when}{phase}{asked}"


def facts(report: RunReport, context: RunContext) -> list[str]:
    """Return how long a run of what this was, each part short."""
    parts = [
        " ".join(context.argv),
        count(report.steps, "step") if report.steps else "",
        "" if context.duration_s is None else duration(context.duration_s),
        f"{report.ranks.seen:,} of {count(report.ranks.of, 'rank')}" if report.ranks.of > 1 else "",
    ]
    return [part for part in parts if part]


def ledger_rows(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Return the rows, those below 1 % of the whole as one, so that the sum stays."""
    total = sum(row.bytes for row in rows)
    small = [row for row in rows if abs(row.bytes) < _SMALL_SHARE * total]
    return _as_one(rows, small, "others, each below 1 %")


def largest_rows(rows: Sequence[LedgerRow], count: int) -> list[LedgerRow]:
    """Return at most so many rows of 1 % of the whole or more, without details, and the others as one."""
    kept = sorted(ledger_rows(rows), key=lambda row: -row.bytes)[:count]
    plain = [msgspec.structs.replace(row, detail=None) for row in rows]
    small = [new for row, new in zip(rows, plain, strict=True) if row not in kept]
    return _as_one(plain, small, "others")


def _as_one(rows: Sequence[LedgerRow], small: Sequence[LedgerRow], name: str) -> list[LedgerRow]:
    if len(small) < 2:
        return list(rows)
    large = [row for row in rows if row not in small]
    return [*large, type(rows[0])(row=name, bytes=sum(row.bytes for row in small))]


def ledger_summary(total: int, step: int | None, steps: int = 0) -> str:
    """Return how much a ledger sums to, and when it was taken, of how many steps.

    >>> ledger_summary(3 << 30, 12, 20), ledger_summary(3 << 30, 0)
    ('3.0 GiB in use, ledger at step 12 of 20', '3.0 GiB in use')
    """
    step = step if step or steps else None
    of = f" of {steps:,}" if step is not None and step < steps else ""
    return f"{size(total)} in use" + ("" if step is None else f", ledger at step {step:,}{of}")


def notes(context: RunContext) -> list[str]:
    """Return what was left out, cut or unusual, the ranks without a record first."""
    if not context.missing:
        return list(context.notes)
    return [_no_record(context), *context.notes]


def _no_record(context: RunContext) -> str:
    return f"no record of {ranks_in_words(context.missing)}"
