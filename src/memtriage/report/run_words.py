"""What reports of a run say on paper, screen or page: verdict, findings drawn together, ledger rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal

from memtriage.diagnose.merge import RunContext
from memtriage.model.findings import GROWING
from memtriage.model.playbook import PLAYBOOK
from memtriage.report.text import KINDS, SEVERE, count, duration, rank_list, rate, size

if TYPE_CHECKING:
    from memtriage.model import Finding, FindingKind, LedgerRow, RunReport, Verdict

Level = Literal["good", "warn", "bad"]
"""How much a verdict matters."""

VERDICTS: Final[dict[Verdict, tuple[str, Level]]] = {
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

OF_ONE_RANK: Final[frozenset[FindingKind]] = frozenset({"rank_differs", "host_limit"})
"""Kinds whose evidence is another on every rank."""
COURSE_MARKS: Final = ("step", "backward")
"""Marks whose course tells most, the best first."""

_RANKS_IN_EVIDENCE: Final = 6
_SMALL_SHARE: Final = 0.01
_WORTH_ACTING: Final = 3
"""Findings that the verdict's line names where the verdict is about none."""
TO_CONFIRM: Final = "watch a longer run: growth is proven once the same holder grew over three intervals"
"""What turns a suspicion into a proof, or ends it."""


@dataclass(slots=True)
class FindingGroup:
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
    def suspected(self) -> bool:
        return self.first.certainty == "suspected"

    @property
    def severe(self) -> bool:
        return self.kind in SEVERE and not self.suspected

    @property
    def ranks(self) -> list[int]:
        return [finding.rank for finding in self.findings if finding.rank is not None]

    @property
    def device(self) -> str:
        return devices_in_words({finding.device for finding in self.findings})

    @property
    def amount(self) -> str:
        """The growth, or else the size, over all ranks."""
        for per, of in _RATES.items():
            if of(self.first) is not None:
                return _spread([of(finding) for finding in self.findings], per)
        return _spread([finding.bytes for finding in self.findings], None)

    @property
    def piled_up(self) -> tuple[str, list[str]]:
        """Label and values of what the headline leaves out where it gives a rate: the size, other rates."""
        finding = self.first
        rates = [rate(amount, per) for per, of in _RATES.items() if (amount := of(finding)) is not None]
        if not rates:
            return "", []
        values = ([] if finding.bytes is None else [size(finding.bytes)]) + rates[1:]
        return "size" if finding.step is None else f"size at step {finding.step:,}", values

    @property
    def detected(self) -> str:
        """When it was found; empty where that is unknown."""
        finding = self.first
        step = "" if finding.step is None else f"at step {finding.step:,}"
        return step if finding.phase is None else f"{step}, in {finding.phase}".removeprefix(", ")

    @property
    def evidence(self) -> list[str]:
        """The measurements; of several ranks those of the first, or one of each where they differ."""
        if len(self.findings) == 1:
            return self.first.evidence
        if self.kind not in OF_ONE_RANK:
            return [f"rank {self.first.rank}: {line}" for line in self.first.evidence]
        shown = self.findings[:_RANKS_IN_EVIDENCE]
        lines = [f"rank {finding.rank}: {line}" for finding in shown for line in finding.evidence[:1]]
        rest = len(self.findings) - len(shown)
        return [*lines, f"and {count(rest, 'more rank')}"] if rest else lines

    def title(self, report: RunReport) -> str:
        """Return what it is, on which device and ranks."""
        on = "" if self.kind == "host_limit" else f" on {self.device}"
        sure = "suspected " if self.suspected else ""
        return f"{sure}{KINDS[self.kind]}{on}{self._where(report)}"

    def _where(self, report: RunReport) -> str:
        if report.ranks.of == 1 or not self.ranks:
            return ""
        if len(self.ranks) == 1:
            return f", rank {self.ranks[0]} only"
        if len(self.ranks) == report.ranks.seen:
            return f", all {report.ranks.seen:,} ranks"
        return f", {len(self.ranks):,} of {report.ranks.seen:,} ranks ({rank_list(self.ranks)})"


_RATES: Final[dict[str, Callable[[Finding], int | None]]] = {
    "step": attrgetter("bytes_per_step"),
    "micro-batch": attrgetter("bytes_per_microbatch"),
    "second": attrgetter("bytes_per_second"),
}
"""Rates of growth, those first that tell most."""


def _spread(amounts: Sequence[int | None], per: str | None) -> str:
    known = [amount for amount in amounts if amount is not None]
    if not known:
        return ""
    low, high = (rate(amount, per) if per else size(amount) for amount in (min(known), max(known)))
    return high if low == high else f"{size(min(known))} to {high}"


def devices_in_words(devices: Collection[str]) -> str:
    """Return devices with runs of numbers drawn together.

    >>> devices_in_words({"cuda:1", "cuda:0", "cuda:2"}), devices_in_words(["cpu"])
    ('cuda:0-2', 'cpu')
    """
    if len(devices) == 1:
        return next(iter(devices))
    numbers = [int(device.partition(":")[2]) for device in devices if device.partition(":")[2].isdigit()]
    return f"cuda:{rank_list(numbers)}" if len(numbers) == len(devices) else ", ".join(sorted(devices))


def fold(findings: Sequence[Finding], runs_out_in: Sequence[int | None]) -> list[FindingGroup]:
    """Draw together what is the same on several ranks, in the order of the findings."""
    groups: dict[tuple[object, ...], list[FindingGroup]] = {}
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
            same.append(FindingGroup([finding], steps))
    order = {id(finding): position for position, finding in enumerate(findings)}
    return sorted(
        (group for same in groups.values() for group in same), key=lambda group: order[id(group.first)]
    )


def _cause(finding: Finding) -> tuple[object, ...]:
    device = finding.device.partition(":")[0]  # every rank has its own cuda:N
    return (finding.kind, device, finding.held_at, finding.allocated_at, finding.phase, finding.mechanism)


def sentence(report: RunReport, context: RunContext, groups: Sequence[FindingGroup]) -> str:
    """Return what stands behind the verdict's word."""
    growing = [group for group in groups if group.kind in GROWING and not group.suspected]
    match report.verdict:
        case "clean":
            return "; ".join([_limits(report, context), *_worth_acting(groups)])
        case "not_judged":
            return "; ".join([_not_judged(report, groups), *_worth_acting(groups)])
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


def _limits(report: RunReport, context: RunContext) -> str:
    """Return how small a leak would have been found, and in how long a run."""
    devices: dict[str, list[str]] = {}
    scales = []
    for device, judged in report.judged.items():
        if judged.detection_limit is not None:
            limit = rate(judged.detection_limit.bytes, judged.detection_limit.per)
            devices.setdefault(limit, []).append(device)
            scales.append((judged.scale, judged.points))
    if not devices:
        return f"no leak, residue or fragmentation found in {count(report.steps, 'step')}"
    limits = " and ".join(f"{limit} on {devices_in_words(names)}" for limit, names in devices.items())
    match scales[0]:
        case "time", _ if context.duration_s is not None:
            rests_on = duration(context.duration_s)
        case "microbatch", points:
            rests_on = count(points, "backward")
        case "step", _:
            rests_on = count(report.steps, "step")
        case _, points:
            rests_on = count(points, "reading")
    return f"no growth above {limits} in {rests_on}"


def _not_judged(report: RunReport, groups: Sequence[FindingGroup]) -> str:
    """Return what is suspected, or else why growth could not be judged, by device where there are several."""
    suspected = next((group for group in groups if group.suspected), None)
    if suspected is not None:
        return f"suspected growth of {suspected.amount} on {suspected.device}; a longer run would settle it"
    reasons: dict[str, list[str]] = {}
    for device, judged in report.judged.items():
        if judged.reason is not None:
            reasons.setdefault(judged.reason, []).append(device)
    if len(report.judged) < 2:
        return next(iter(reasons), "growth could not be judged")
    return "; ".join(f"{devices_in_words(devices)}: {why}" for why, devices in reasons.items())


def _worth_acting(groups: Sequence[FindingGroup]) -> list[str]:
    """Return what needs action and no verdict is about, e.g. `workers un-share memory: 2.0 GiB`."""
    parts = [
        f"{KINDS[group.kind]}{': ' if group.amount else ''}{group.amount}"
        for group in groups
        if not group.suspected
    ]
    rest = parts[_WORTH_ACTING:]
    return parts[:_WORTH_ACTING] + ([f"{count(len(rest), 'more finding')} below"] if rest else [])


def _until_full(group: FindingGroup) -> str:
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


def facts(report: RunReport, context: RunContext) -> list[str]:
    """Return how long a run of what this was, each part short."""
    parts = [
        " ".join(context.argv),
        count(report.steps, "step"),
        "" if context.duration_s is None else duration(context.duration_s),
        f"{report.ranks.seen:,} of {count(report.ranks.of, 'rank')}" if report.ranks.of > 1 else "",
    ]
    return [part for part in parts if part]


def playbook_entry(name: str, dot: str) -> str:
    """Return a playbook entry's name with its subject, `dot` between them."""
    entry = PLAYBOOK.get(name)
    return name if entry is None else f"{name}{dot}{entry.subject}"


def ledger_rows(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Return the rows, those below 1 % of the whole as one, so that the sum stays."""
    total = sum(row.bytes for row in rows)
    small = [row for row in rows if abs(row.bytes) < _SMALL_SHARE * total]
    if len(small) < 2:
        return list(rows)
    large = [row for row in rows if abs(row.bytes) >= _SMALL_SHARE * total]
    return [*large, type(rows[0])(row=f"{len(small)} smaller rows", bytes=sum(row.bytes for row in small))]


def ledger_summary(total: int, step: int | None) -> str:
    """Return how much a ledger sums to, and when it was taken.

    >>> ledger_summary(3 << 30, 12)
    '3.0 GiB in use, ledger at step 12'
    """
    return f"{size(total)} in use" + ("" if step is None else f", ledger at step {step:,}")


def notes(context: RunContext) -> list[str]:
    """Return what was left out, cut or unusual, the ranks without a record first."""
    if not context.missing:
        return list(context.notes)
    ranks = "rank" if len(context.missing) == 1 else "ranks"
    return [f"no record of {ranks} {rank_list(context.missing)}", *context.notes]
