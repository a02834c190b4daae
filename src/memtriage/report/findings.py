"""Findings as all reports show them: those that several ranks share as one, and what is known of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from memtriage.model.findings import GROWING, SEVERE, TRAITS
from memtriage.model.units import UNKNOWN, count, devices_in_words, rank_list, rate, size
from memtriage.report import labels
from memtriage.report.labels import KINDS

if TYPE_CHECKING:
    from memtriage.model.findings import Finding, FindingKind
    from memtriage.model.report import RunReport

_RANKS_IN_EVIDENCE: Final = 6
_MORE_GROWTH: Final = "run longer: growth is proven once it has gone on for some more censuses"
_BATCH_ALONE: Final = "run a step with this batch first, or `memtriage predict --horizon`"


class FindingFact(NamedTuple):
    """What is known of a finding: a label, its values, and what they are.

    Attributes:
        form: `path` is searched for, and so stays whole; a `list` is of sentences.
    """

    label: str
    values: list[str]
    form: Literal["words", "path", "fix", "list"] = "words"


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
    def to_confirm(self) -> str | None:
        """What turns a suspicion into a proof, or ends it; None where there is nothing to confirm."""
        if not self.suspected:
            return None
        return _BATCH_ALONE if self.first.ahead else _MORE_GROWTH

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
    def place(self) -> str:
        """The device, or the process where it is not the main one."""
        process = self.first.process
        return f" on {self.device}" if process is None else f" in {process}"

    @property
    def amount(self) -> str:
        """The growth, or else the size, over all ranks."""
        for per in self.first.rates:
            return _spread([finding.rates.get(per) for finding in self.findings], per)
        return _spread([finding.bytes for finding in self.findings], None)

    @property
    def piled_up(self) -> tuple[str, list[str]]:
        """Label and values of what the headline leaves out where it gives a rate.

        These are the size, other rates, and how often what it grows with comes.
        """
        finding = self.first
        rates = [rate(amount, per) for per, amount in finding.rates.items()]
        if not rates:
            return "", []
        values = ([] if finding.bytes is None else [size(finding.bytes)]) + rates[1:]
        apart = round((finding.bytes_per_event or 0) / (finding.bytes_per_step or math.inf))
        if apart > 1:
            values.append(f"every {apart} steps")
        if finding.bytes_per_second is not None:  # a program without steps
            return labels.size_label(None), values
        return labels.size_label(finding.step if finding.bytes_step is None else finding.bytes_step), values

    @property
    def detected(self) -> str:
        """When it was found; without the step where that is unknown, or where it is judged again and again.

        Growth is, from all of the run: its step would be that of the last judgment, not of the first.
        """
        return labels.detected(None if self.first.rates else self.first.step, self.first.phase)

    @property
    def evidence(self) -> list[str]:
        """The measurements; of several ranks those of the first, or one of each where they differ."""
        if len(self.findings) == 1:
            return self.first.evidence
        if not TRAITS[self.kind].per_rank:
            return [f"rank {self.first.rank}: {line}" for line in self.first.evidence]
        shown = self.findings[:_RANKS_IN_EVIDENCE]
        lines = [f"rank {finding.rank}: {line}" for finding in shown for line in finding.evidence[:1]]
        rest = len(self.findings) - len(shown)
        return [*lines, f"and {count(rest, 'more rank')}"] if rest else lines

    def title(self, report: RunReport) -> str:
        """Return what it is, on which device and ranks."""
        on = "" if self.kind == "host_limit" else self.place
        sure = "suspected " if self.suspected else ""
        return f"{sure}{KINDS[self.kind]}{on}{self._where(report)}"

    def facts(self, dot: str, steps: int | None = None) -> list[FindingFact]:
        """Return what is known, the holder first.

        Args:
            dot: what stands between short facts.
            steps: of the run; given, the step at which memory will be full is a fact too.
        """
        first = self.first
        label, piled_up = self.piled_up
        entry = None if first.playbook is None else labels.playbook_entry(first.playbook, dot)
        full = None
        if steps is not None and self.runs_out_in is not None:
            full = f"in {count(self.runs_out_in, 'step')}, at step {steps + self.runs_out_in:,}"
        known = [
            _fact(labels.KEPT_ALIVE_BY, first.holder or (UNKNOWN if self.kind in GROWING else None), "path"),
            FindingFact(labels.ALSO_KEPT_ALIVE_BY, first.also_held_by, "path"),
            _fact(labels.STORED_AT, first.stored_at, "path"),
            _fact(labels.ALLOCATED_AT, first.allocated_at, "path"),
            _fact(label, dot.join(piled_up)),
            _fact(labels.RUNS_OUT, full),
            _fact(labels.DETECTED, self.detected),
            _fact(labels.WHY, first.mechanism),
            _fact(labels.FIX, first.fix, "fix"),
            _fact(labels.TO_CONFIRM, self.to_confirm),
            FindingFact(labels.EVIDENCE, self.evidence, "list"),
            _fact(labels.PLAYBOOK, entry),
        ]
        return [fact for fact in known if fact.values]

    def _where(self, report: RunReport) -> str:
        if report.ranks.of == 1 or not self.ranks:
            return ""
        if len(self.ranks) == 1:
            return f", rank {self.ranks[0]} only"
        if len(self.ranks) == report.ranks.seen:
            return f", all {report.ranks.seen:,} ranks"
        return f", {len(self.ranks):,} of {report.ranks.seen:,} ranks ({rank_list(self.ranks)})"


def _spread(amounts: Sequence[int | None], per: str | None) -> str:
    known = [amount for amount in amounts if amount is not None]
    if not known:
        return ""
    low, high = (rate(amount, per) if per else size(amount) for amount in (min(known), max(known)))
    return high if low == high else f"{size(min(known))} to {high}"


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
    open_one = finding.certainty == "suspected"
    place = (finding.process, finding.held_at, finding.allocated_at, finding.phase, finding.mechanism)
    return (finding.kind, open_one, device, *place)


def _fact(label: str, value: str | None, form: Literal["words", "path", "fix"] = "words") -> FindingFact:
    return FindingFact(label, [value] if value else [], form)
