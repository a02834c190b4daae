"""A run in progress, according to its record: one line per rank, and what was found so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from memtriage.account.gpu_ledger import STRANDED
from memtriage.diagnose.growth.estimate import FEWEST, floor_rise, policy_of
from memtriage.diagnose.growth.evidence import WARM_UP
from memtriage.diagnose.ranks.merge import RunContext, context, merge
from memtriage.model.marks import Mark
from memtriage.model.report import RankCount, RunReport
from memtriage.model.run_status import rows_of
from memtriage.store.locate import RecordError
from memtriage.store.reader import RankRecord, read_run

RankState = Literal["running", "ended", "killed", "silent"]

SILENT_AFTER_S: Final = 120.0
"""If a rank of another machine wrote nothing for this long, it may be dead; that cannot be seen from here."""


@dataclass(frozen=True, slots=True)
class RankLine:
    """The state of a rank. Sizes in bytes, None if unknown.

    Attributes:
        rank: None in a run without ranks.
        host: the machine it runs on.
        device: its fullest device, a GPU before the CPU; None before the first mark.
        step: completed optimizer steps.
        allocated, reserved: of that device, at its last mark.
        peak: highest allocated bytes at a mark; once the rank has ended, the allocator's own peak.
        stranded: of that device, as of the last ledger.
        host_rss: resident set of the process.
        growth: bytes per step by which the floor of the recent steps rises; 0 if it does not, None if there
            are too few steps.
        last_mark: name of the last mark.
        age_s: seconds since the last line with a time.
        state: `killed` if its process is gone and wrote no end; `silent` if it is on another machine and
            wrote nothing for `SILENT_AFTER_S`.
        verdict: the rank's own verdict, once it has ended.
    """

    rank: int | None
    host: str | None
    device: str | None
    step: int
    allocated: int | None
    reserved: int | None
    peak: int | None
    stranded: int | None
    host_rss: int | None
    growth: int | None
    last_mark: str | None
    age_s: float | None
    state: RankState
    verdict: str | None


@dataclass(frozen=True, slots=True)
class LiveView:
    """A run at one instant of its life.

    Attributes:
        lines: a line for each rank that has a record, by rank.
        report, context: all ranks joined, as by `memtriage report`.
        run_id, restart: which run this is.
        waiting: why there is no record to show; None if there is one.
    """

    lines: list[RankLine] = field(default_factory=list)
    report: RunReport | None = None
    context: RunContext | None = None
    run_id: str = ""
    restart: int = 0
    waiting: str | None = None

    @property
    def finished(self) -> bool:
        """Whether no rank can write any more: all have ended or are gone, and none will begin."""
        over = all(line.state in ("ended", "killed") for line in self.lines)
        return over and self.report is not None and self.report.ranks.seen == self.report.ranks.of


def live_view(paths: Sequence[Path], now: float) -> LiveView:
    """Read a run's record and return where the run stands.

    Args:
        paths: each the directory of all runs, of a run, of a restart, or one rank's file. Several are the
            node-local directories of one run.
        now: Unix time in seconds.
    """
    try:
        run = read_run(paths, ahead=True)
    except RecordError as error:
        return LiveView(waiting=str(error))
    lines = [_line(record, now) for record in run.ranks]
    live = any(line.state in ("running", "silent") for line in lines)
    report = merge(run, live=live)
    start = run.ranks[0].start
    world = max(len(lines), *(record.start.world_size for record in run.ranks))
    return LiveView(
        lines,
        msgspec.structs.replace(
            report,
            steps=max(line.step for line in lines),
            ranks=RankCount(seen=len(lines), of=world),
        ),
        context(run, report, live=live),
        run_id=start.run_id,
        restart=start.restart,
    )


def _line(record: RankRecord, now: float) -> RankLine:
    latest: dict[str, Mark] = {}
    peaks: dict[str, int] = {}
    for mark in record.marks:
        if mark.allocated is not None:
            if mark.name != "end" or mark.device not in latest:  # then the program's variables are gone
                latest[mark.device] = mark
            peaks[mark.device] = max(mark.allocated, peaks.get(mark.device, 0))
    main = main_mark(latest.values())
    device = "" if main is None else main.device
    last = record.marks[-1] if record.marks else None
    last_at = None if record.start.time is None else record.start.time + record.last_time_s
    age_s = None if last_at is None else max(0.0, now - last_at)
    rss = None if last is None else last.host_rss
    if rss is None and record.host:
        rss = record.host[-1].rss
    return RankLine(
        rank=record.start.rank,
        host=record.start.host,
        device=device or None,
        step=record.last_step,
        allocated=None if main is None else main.allocated,
        reserved=None if main is None else main.reserved,
        peak=({} if record.end is None else record.end.peak_allocated).get(device, peaks.get(device)),
        stranded=_stranded(record, device),
        host_rss=rss,
        growth=_growth(record, device),
        last_mark=None if last is None else last.name,
        age_s=age_s,
        state=_state(record, age_s),
        verdict=None if record.end is None else record.end.verdict,
    )


def _growth(record: RankRecord, device: str) -> int | None:
    """The growth from step to step."""
    marks = [mark for mark in record.marks if mark.name == "step" and mark.device == device]
    settled = [(mark.step, mark.allocated) for mark in marks if mark.allocated is not None][WARM_UP:]
    recent = settled[-max(FEWEST, len(settled) // 2) :]
    rate, policy = floor_rise(recent), policy_of(device)
    if rate is None:
        return None
    grown = rate * (recent[-1][0] - recent[0][0])
    return round(rate) if rate >= policy.least and grown >= policy.settles else 0


def main_mark(latest: Iterable[Mark]) -> Mark | None:
    """The mark of the fullest device, a GPU before the CPU, of the last ones of a rank's devices."""
    return max(latest, key=lambda mark: (mark.device.startswith("cuda"), mark.allocated or 0), default=None)


def _stranded(record: RankRecord, device: str) -> int | None:
    ledger = record.ledgers.get(device)
    return None if ledger is None or ledger.device == "host" else rows_of(ledger).get(STRANDED, 0)


def _state(record: RankRecord, age_s: float | None) -> RankState:
    if record.end is not None:
        return "ended"
    if record.alive is None:
        return "running" if age_s is not None and age_s < SILENT_AFTER_S else "silent"
    return "running" if record.alive else "killed"
