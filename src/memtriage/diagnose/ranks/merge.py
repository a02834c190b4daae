"""Join the ranks of a run into one report: findings of all, ranks that differ, ranks that were killed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import msgspec
import numpy as np

from memtriage.diagnose.growth.roles import ITSELF
from memtriage.diagnose.ranks.killed import Fate, fate, host_limit_finding, killed_note
from memtriage.diagnose.ranks.outliers import compare_ranks
from memtriage.diagnose.verdict import verdict, weakest
from memtriage.model.evidence import Readings, Role
from memtriage.model.findings import TRAITS, Finding, Verdict
from memtriage.model.judged import Judged
from memtriage.model.ledger import LedgerRow
from memtriage.model.marks import Mark
from memtriage.model.report import RankCount, RunReport
from memtriage.model.units import MIB, ranks_in_words
from memtriage.store.reader import RankRecord, RunRecord
from memtriage.store.records import SCHEMA

_WORST_FIRST: Final[tuple[Verdict, ...]] = (
    "out_of_memory",
    "leak",
    "residue",
    "fragmentation",
    "killed",
    "error",
    "not_judged",
    "clean",
)
_KILLED_TOLD: Final = 3


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a person wants to know about a run in addition to its report.

    Attributes:
        argv: the script and its arguments.
        duration_s: seconds that the longest rank was watched.
        ledger_rank: the rank whose ledger the report shows; None without ranks, or without a ledger.
        killed: ranks that wrote no end and are gone; a process without rank counts as rank 0.
        running: ranks that wrote no end and may still run.
        missing: ranks without a record.
        runs_out_in: for each finding of the report, the steps until its growth has used up the device or
            the host; None if unknown.
        notes: sentences on what was left out, cut or unusual.
        courses: the anonymous memory of other processes over time, by what they do and by process.
    """

    argv: list[str] = field(default_factory=list)
    duration_s: float | None = None
    ledger_rank: int | None = None
    killed: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    runs_out_in: list[int | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    courses: dict[str, list[Mark]] = field(default_factory=dict)

    def course_of(self, process: str | None) -> list[Mark]:
        """Return the course of a finding's process, or of several together: "2 workers of ..."."""
        return self.courses.get((process or "").lstrip("0123456789 "), [])


def merge(run: RunRecord, *, live: bool = False) -> RunReport:
    """Join the ranks of a run.

    The finding that killed the run comes first, suspicions come last.

    The ledger is that of rank 0, or of the first rank that wrote one. A rank was killed if its process is
    gone and wrote no end. Then that is the verdict, unless a rank that was not killed found something. The
    run is clean only if every rank is. For each device, `judged` has the judgment that proves least.

    Args:
        run: the ranks' records.
        live: the run has not ended: a rank of another machine without an end still runs, and the verdict is
            never `killed`.
    """
    fates = [fate(rank, live=live) for rank in run.ranks]
    findings = [finding for rank in run.ranks for finding in _own_findings(rank)]
    compared = compare_ranks(run.ranks, live=live)
    findings += compared.findings
    killed_by = [
        finding
        for rank, end in zip(run.ranks, fates, strict=True)
        if end == "killed" and (finding := host_limit_finding(rank, run.ranks)) is not None
    ]
    findings = sorted(killed_by, key=_weight) + sorted(findings, key=_place)
    return RunReport(
        verdict=_verdict(run.ranks, fates, live),
        steps=max((rank.last_step for rank in run.ranks), default=0),
        findings=findings,
        marks=list(chain.from_iterable(rank.marks for rank in run.ranks)),
        ledger=_ledger(run.ranks),
        ledger_steps=_ledger_steps(run.ranks),
        exception=_exception(run.ranks),
        judged=_judged(run.ranks),
        ranks=RankCount(seen=len(run.ranks), of=_world_size(run.ranks)),
        rank_groups=msgspec.UNSET if compared.groups is None else compared.groups,
    )


def context(run: RunRecord, report: RunReport, *, live: bool = False) -> RunContext:
    """Return what the terminal report says in addition to `report`, the result of `merge(run, live=live)`."""
    by_rank = {rank.start.rank: rank for rank in run.ranks}
    seen = {rank.number for rank in run.ranks}
    with_ledger = _ledger_rank(run.ranks)
    return RunContext(
        argv=run.ranks[0].start.argv if run.ranks else [],
        duration_s=max((rank.last_time_s for rank in run.ranks), default=None),
        ledger_rank=None if with_ledger is None else with_ledger.start.rank,
        killed=[rank.number for rank in run.ranks if fate(rank, live=live) == "killed"],
        running=[rank.number for rank in run.ranks if fate(rank, live=live) == "running"],
        missing=[rank for rank in range(report.ranks.of) if rank not in seen],
        runs_out_in=[_runs_out_in(finding, by_rank.get(finding.rank), live) for finding in report.findings],
        notes=[*run.notes, *_notes(run.ranks, live)],
        courses=dict(chain.from_iterable(_courses(rank) for rank in reversed(run.ranks))),
    )


def _courses(rank: RankRecord) -> Iterator[tuple[str, list[Mark]]]:
    courses = process_courses(rank)
    yield from courses.items()
    for line in rank.evidence:
        if isinstance(line, Role) and line.group in courses:
            yield line.role, courses[line.group]


def process_courses(rank: RankRecord) -> dict[str, list[Mark]]:
    """Return the anonymous memory of other processes over time, of those together that do the same work."""
    roles = {line.role: line for line in rank.evidence if isinstance(line, Role)}
    groups = {name: role.group for name, role in roles.items()}
    factors = {name: role.each / MIB for name, role in roles.items() if role.each}  # their number is read
    series: dict[str, dict[str, list[Readings]]] = defaultdict(lambda: defaultdict(list))
    for line in rank.evidence:
        if isinstance(line, Readings) and (line.scale, line.counter) == ("second", "cpu"):
            series[groups.get(line.role, "")][line.role].append(line)
    at = [mark.time_s for mark in rank.marks] or [0.0]
    at_steps = [mark.step for mark in rank.marks] or [0]
    courses = {}
    for group in series.keys() - {"", ITSELF}:  # the main process has its own marks
        sizes = [
            (
                [each for line in lines for each in line.at],
                [factors.get(role, 1.0) * each for line in lines for each in line.means],
            )
            for role, lines in series[group].items()
        ]
        times = sorted({each for read, _ in sizes for each in read})
        total = np.sum([np.interp(times, read, means, left=0, right=0) for read, means in sizes], axis=0)
        courses[group] = [
            Mark(
                name="time", step=int(step), microbatch=0, rank=rank.start.rank, time_s=time_s, device=group,
                allocated=round(nbytes),
            )
            for time_s, step, nbytes in zip(times, np.interp(times, at, at_steps), total, strict=True)
        ]  # fmt: skip
    return dict(sorted(courses.items()))


# Joining


def _own_findings(rank: RankRecord) -> list[Finding]:
    return [
        msgspec.structs.replace(finding, rank=rank.start.rank) if finding.rank is None else finding
        for finding in rank.findings
    ]


def _place(finding: Finding) -> tuple[bool, tuple[int, int, int]]:
    return finding.certainty == "suspected", _weight(finding)


def _weight(finding: Finding) -> tuple[int, int, int]:
    word = TRAITS[finding.kind].verdict
    amount = next(iter(finding.rates.values()), finding.bytes or 0)
    return (len(_WORST_FIRST) if word is None else _WORST_FIRST.index(word), -amount, finding.rank or 0)


def _verdict(ranks: Sequence[RankRecord], fates: Sequence[Fate], live: bool) -> Verdict:
    words = [
        "killed" if end == "killed" and not live else _own_verdict(rank)
        for rank, end in zip(ranks, fates, strict=True)
    ]
    if len(ranks) < _world_size(ranks):
        words.append("not_judged")
    return min(words, key=_WORST_FIRST.index, default="not_judged")


def _own_verdict(rank: RankRecord) -> Verdict:
    """Return a rank's verdict; the recorded one if that is an error, or its record lacks the judgments."""
    end = rank.end
    if end is None:
        return verdict(rank.findings, False, {})
    word = verdict(rank.findings, end.verdict == "out_of_memory", end.judged or {})
    unsaid = end.judged is None or end.verdict == "error"
    return end.verdict if word == "not_judged" and unsaid else word


def _judged(ranks: Sequence[RankRecord]) -> dict[str, Judged]:
    """Return the weakest judgment of each device, with its rank if not all ranks were judged."""
    by_device: dict[str, list[tuple[RankRecord, Judged]]] = {}
    for rank in ranks:
        for device, judgment in (rank.end.judged or {} if rank.end is not None else {}).items():
            by_device.setdefault(device, []).append((rank, judgment))
    joined = {}
    for device, known in by_device.items():
        least = weakest(judgment for _, judgment in known)
        of = [rank.number for rank, judgment in known if judgment.reason is not None]
        if of and len(of) < len(ranks):
            least = msgspec.structs.replace(least, reason=f"{ranks_in_words(of)}: {least.reason}")
        joined[device] = least
    return joined


def _exception(ranks: Sequence[RankRecord]) -> str | None:
    """Return what ended the script: the error of a rank that ran out of memory, because others follow it."""
    ends = [rank.end for rank in ranks if rank.end is not None and rank.end.exception is not None]
    ends.sort(key=lambda end: end.verdict != "out_of_memory")
    return ends[0].exception if ends else None


def _world_size(ranks: Sequence[RankRecord]) -> int:
    return max([len(ranks), *(rank.start.world_size for rank in ranks)])


def _ledger_rank(ranks: Sequence[RankRecord]) -> RankRecord | None:
    return next((rank for rank in ranks if rank.ledgers), None)


def _ledger(ranks: Sequence[RankRecord]) -> dict[str, list[LedgerRow]]:
    rank = _ledger_rank(ranks)
    return {} if rank is None else {device: ledger.rows for device, ledger in rank.ledgers.items()}


def _ledger_steps(ranks: Sequence[RankRecord]) -> dict[str, int]:
    rank = _ledger_rank(ranks)
    ledgers = {} if rank is None else rank.ledgers
    return {device: ledger.step for device, ledger in ledgers.items() if ledger.step is not None}


# Notes


def _notes(ranks: Sequence[RankRecord], live: bool) -> list[str]:
    killed = [rank for rank in ranks if fate(rank, live=live) == "killed"]
    notes = [killed_note(rank, ranks) for rank in killed[:_KILLED_TOLD]]
    if len(killed) > _KILLED_TOLD:
        notes.append(f"{len(killed) - _KILLED_TOLD:,} more ranks were killed")
    if running := [rank for rank in ranks if fate(rank, live=live) == "running"]:
        names = _few([rank.name for rank in running])
        notes.append(f"{names} had not finished: figures so far")
    if cut := sum(rank.cut_lines for rank in ranks):
        files = sum(1 for rank in ranks if rank.cut_lines)
        notes.append(
            f"{cut} cut or garbled line{'s' * (cut != 1)} left out, in {files} of {len(ranks)} records"
        )
    if newer := [rank for rank in ranks if rank.start.schema > SCHEMA]:
        notes.append(
            f"written by a newer memtriage (record format {newer[0].start.schema}): some may be missing"
        )
    counts = Counter(note for rank in ranks for note in dict.fromkeys(rank.notes))
    if len(ranks) == 1:
        return notes + list(counts)
    return notes + [f"{note} ({times} of {len(ranks)} ranks)" for note, times in counts.items()]


_MOST_NAMED: Final = 4


def _few(names: list[str]) -> str:
    shown, more = ", ".join(names[:_MOST_NAMED]), len(names) - _MOST_NAMED
    return shown if more <= 0 else f"{shown} and {more} more"


# How long it lasts


def _runs_out_in(finding: Finding, rank: RankRecord | None, live: bool) -> int | None:
    """Return the steps until a finding's growth has used up its device, or the host."""
    if rank is None or finding.kind == "rank_differs" or fate(rank, live=live) == "killed":
        return None
    if rank.end is not None and rank.end.verdict == "out_of_memory":
        return None
    if finding.projection is not None and finding.projection.step is not None:
        return max(0, finding.projection.step - rank.last_step)  # the evidence names the same step
    limit, used = _room(finding.device, rank)
    if limit is None or used is None or not finding.bytes_per_step or finding.bytes_per_step < 0:
        return None
    return max(0, (limit - used) // finding.bytes_per_step)


def _room(device: str, rank: RankRecord) -> tuple[int | None, int | None]:
    """Return a device's limit, and how much of it a step needs; free reserved memory is available."""
    if not device.startswith("cuda"):
        last = next((mark for mark in reversed(rank.marks) if mark.host_rss is not None), None)
        return rank.start.host_limit, None if last is None else last.host_rss
    mark = next((mark for mark in reversed(rank.marks) if mark.device == device), None)
    if mark is None or mark.allocated is None:
        return rank.device_limits.get(device), None
    passing = {} if rank.end is None else rank.end.passing
    return rank.device_limits.get(device), mark.allocated + passing.get(device, 0)
