"""The page of a run: one HTML file, to be opened anywhere, that loads nothing.

It says what the terminal report says, and draws what a terminal cannot: every device's course, for each rank
that matters. The limits below keep the file under `html.shell.LARGEST` bytes, for thousands of ranks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from msgspec import UnsetType

from memtriage.diagnose.ranks.killed import fate
from memtriage.diagnose.ranks.merge import RunContext
from memtriage.model.findings import DEVICE_HOST
from memtriage.model.rank_groups import RankGroups
from memtriage.model.report import RunReport
from memtriage.model.units import UNKNOWN, count, duration, rank_list, size
from memtriage.model.version import __version__
from memtriage.report.findings import FindingGroup, fold
from memtriage.report.html.shell import report_page
from memtriage.report.labels import KINDS
from memtriage.report.run.course import charts
from memtriage.report.run.ledger import ledger
from memtriage.report.run.ranks import compared_ranks
from memtriage.report.run.words import (
    VERDICTS,
    facts,
    notes,
    sentence,
)
from memtriage.store.reader import RankRecord, RunRecord

_DRAWN_RANKS: Final = 48
"""Ranks that the charts can show one by one."""
_LISTED_RANKS: Final = 200
_LEDGER_RANKS: Final = 8
_FINDINGS: Final = 40
_EVIDENCE: Final = 12
_NOTES: Final = 40
_LONGEST: Final = 1200
"""Characters of a sentence or path on the page."""
_LONGEST_EXCEPTION: Final = 8000

_ABOUT: Final = (
    "A mark is an instant at which the counters were read, such as the end of a step or of a backward.",
    "Sizes are bytes in binary units. Allocated: what live tensors take of the allocator. Reserved: what the "
    "allocator has from the driver. A ledger's rows never overlap and sum to the total that was measured.",
    "Everything on this page is in this file; it loads nothing.",
)


def html(run: RunRecord, report: RunReport, context: RunContext) -> str:
    """Return the page of a run, of at most `html.shell.LARGEST` bytes.

    Args:
        run: the ranks' records.
        report, context: what `memtriage.diagnose.ranks.merge` made of them.
    """
    title = Path(context.argv[0]).name if context.argv else "a run"
    return report_page(title, _data(run, report, context, title), "ranks.js", "run.js")


def _data(run: RunRecord, report: RunReport, context: RunContext, title: str) -> dict[str, Any]:
    groups = fold(report.findings, context.runs_out_in)
    word, level = VERDICTS[report.verdict]
    labels = _Labels(run.ranks, groups, report.rank_groups)
    notable = _notable(run.ranks, labels, context)
    rest = groups[_FINDINGS:]
    of_process = context.course_of(groups[0].first.process) if groups else []
    interest = of_process[0].device if of_process else groups[0].first.device if groups else None
    return {
        "brand": f"memtriage {__version__} · run",
        "title": title,
        "facts": _cut(" · ".join(facts(report, context)[1 if context.argv else 0 :])),
        "verdict": {"level": level, "word": word, "text": _cut(sentence(report, context, groups))},
        "ended": None if report.exception is None else _cut(report.exception, _LONGEST_EXCEPTION),
        "findings": [_finding(group, report) for group in groups[:_FINDINGS]],
        "more": f"and {count(len(rest), 'more finding')}: `memtriage report` lists them all"
        if rest
        else None,
        "charts": charts(run.ranks, notable[:_DRAWN_RANKS], labels.of, interest),
        "ledgers": [
            {
                "rank": _rank_label(rank, labels),
                "devices": [ledger(taken, report.steps) for taken in _ordered(rank)],
            }
            for rank in notable
            if rank.ledgers
        ][:_LEDGER_RANKS],
        "compared": compared_ranks(report),
        "ranks": _ranks(run.ranks, notable, labels),
        "run": _what_ran(run.ranks, report, context),
        "notes": _notes(context),
        "about": list(_ABOUT),
    }


# Findings


def _finding(group: FindingGroup, report: RunReport) -> dict[str, Any]:
    return {
        "level": "bad" if group.severe else "warn",
        "words": _cut(group.title(report)),
        "amount": group.amount,
        "facts": [
            fact._replace(values=[_cut(value) for value in fact.values[:_EVIDENCE]])
            for fact in group.facts(" · ", report.steps)
        ],
    }


# Ranks


class _Labels:
    """What makes a rank worth a look: findings that not all ranks have, a bad end, and what stands out."""

    def __init__(
        self,
        ranks: Sequence[RankRecord],
        groups: Sequence[FindingGroup],
        compared: RankGroups | UnsetType,
    ) -> None:
        self._said: dict[int, list[tuple[str, bool | None]]] = {}
        for rank in ranks:
            if fate(rank) == "killed":
                self._said.setdefault(rank.number, []).append(("killed", None))
        for group in groups:
            on_host = group.first.device in ("cpu", DEVICE_HOST)
            for number in group.ranks if len(group.ranks) < len(ranks) else ():
                self._said.setdefault(number, []).append((KINDS[group.kind], on_host))
        for outlier in () if isinstance(compared, UnsetType) else compared.outliers:
            if outlier.rank not in self._said:  # the others' findings say it already
                words = f"fewer {outlier.differs[0].figure}" if outlier.differs else "stands out"
                self._said[outlier.rank] = [(words, None)]

    def __contains__(self, number: int) -> bool:
        return number in self._said

    def of(self, number: int, on_host: bool | None = None) -> str | None:
        """Return a rank's label: all, or what concerns the host's memory, or that of its GPUs."""
        said = self._said.get(number, [])
        words = [words for words, where in said if None in (on_host, where) or where == on_host]
        return ", ".join(dict.fromkeys(words)) or None


def _notable(ranks: Sequence[RankRecord], labels: _Labels, context: RunContext) -> list[RankRecord]:
    """Return the ranks, those first that a reader will look for: labeled, then the ledger's, then evenly."""
    every = max(1, -(-len(ranks) // _DRAWN_RANKS))
    even = {rank.number for rank in ranks[::every]}
    shown = context.ledger_rank or 0
    return sorted(
        ranks,
        key=lambda rank: (
            rank.number not in labels,
            rank.number != shown,
            rank.number not in even,
            rank.number,
        ),
    )


def _rank_label(rank: RankRecord, labels: _Labels) -> str:
    label = labels.of(rank.number)
    return f"rank {rank.number}" + ("" if label is None else f" ({label})")


def _ordered(rank: RankRecord) -> list[Any]:
    """Return a rank's ledgers, GPUs before the host."""
    return [one for _, one in sorted(rank.ledgers.items(), key=lambda item: (item[0] == "host", item[0]))]


def _ranks(
    ranks: Sequence[RankRecord], notable: Sequence[RankRecord], labels: _Labels
) -> dict[str, Any] | None:
    if len(ranks) < 2:
        return None
    shown = sorted(notable[:_LISTED_RANKS], key=lambda rank: rank.number)
    return {
        "rows": [
            {
                "rank": rank.number,
                "host": _cut(rank.start.host or UNKNOWN),
                "steps": rank.last_step,
                "watched_s": rank.last_time_s,
                "end": _end(rank),
                "label": labels.of(rank.number),
            }
            for rank in shown
        ],
        "note": "" if len(shown) == len(ranks) else f"{len(shown):,} of {count(len(ranks), 'rank')}",
    }


def _end(rank: RankRecord) -> str:
    if rank.end is None:
        return fate(rank)
    said = rank.end.exception
    if said is None:
        return "ended" if rank.end.exit_code in (None, 0) else f"exit status {rank.end.exit_code}"
    return _cut(" ".join(said.split()), 200)


# What was run


def _what_ran(ranks: Sequence[RankRecord], report: RunReport, context: RunContext) -> list[list[str]]:
    start = ranks[0].start
    began = [rank.start.time for rank in ranks if rank.start.time]
    hosts = sorted({rank.start.host for rank in ranks if rank.start.host})
    limits = {name: limit for name, limit in ranks[0].device_limits.items() if name.startswith("cuda")}
    pairs = [
        ("command", " ".join(context.argv)),
        ("started", f"{datetime.fromtimestamp(min(began), UTC):%Y-%m-%d %H:%M:%S} UTC" if began else ""),
        ("watched for", "" if context.duration_s is None else duration(context.duration_s)),
        ("steps", f"{report.steps:,}"),
        ("ranks", f"{report.ranks.seen:,} of {report.ranks.of:,}" if report.ranks.of > 1 else ""),
        ("ranks killed", rank_list(context.killed) if report.ranks.of > 1 else ""),
        ("machine", hosts[0] if len(hosts) == 1 else f"{len(hosts):,} machines" if hosts else ""),
        ("Python", start.python or UNKNOWN),
        ("torch", start.torch or UNKNOWN),
        ("device limit", ", ".join(f"{name} {size(limit)}" for name, limit in sorted(limits.items()))),
        ("host limit", "" if start.host_limit is None else size(start.host_limit)),
        ("exit status", _exit_status(ranks)),
        ("run", f"{start.run_id}, restart {start.restart}" if start.restart else start.run_id),
    ]
    return [[name, _cut(value)] for name, value in pairs if value]


def _exit_status(ranks: Sequence[RankRecord]) -> str:
    codes = {rank.end.exit_code for rank in ranks if rank.end is not None and rank.end.exit_code is not None}
    return ", ".join(str(code) for code in sorted(codes))


def _notes(context: RunContext) -> list[str]:
    shown = [_cut(note) for note in notes(context)]
    rest = len(shown) - _NOTES
    return [*shown[:_NOTES], f"and {count(rest, 'more note')}"] if rest > 0 else shown


def _cut(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
