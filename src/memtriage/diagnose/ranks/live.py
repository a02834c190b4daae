"""A run in progress, according to its record: one line per rank, and what was found so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from memtriage.process.stdlib import time
from memtriage.store.locate import RecordError
from memtriage.store.reader import RankRecord, RunRecord
from memtriage.store.tail import RankTail, RunTail

RankState = Literal["running", "ended", "killed", "silent"]

SILENT_AFTER_S: Final = 120.0
"""If a rank of another machine wrote nothing for this long, it may be dead; that cannot be seen from here."""


@dataclass(frozen=True, slots=True)
class LivePolicy:
    """How much time the following of a run may take.

    Attributes:
        look_again_s: seconds from one search for new files to the next.
        judge_share: part of the time that joining the ranks may take; the ranks' own lines are always new.
    """

    look_again_s: float = 2.0
    judge_share: float = 0.1


POLICY: Final = LivePolicy()


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
        report, context: all ranks joined, as by `memtriage report`; with many ranks they may be some seconds
            old.
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


class LiveRun:
    """Follows a run. Only one thread may use it at a time.

    Args:
        paths: as for `memtriage.store.tail.RunTail`.
        clock: Unix time in seconds.
        policy: how much time it may take.
    """

    def __init__(
        self, paths: Sequence[Path], clock: Callable[[], float] = time.time, policy: LivePolicy = POLICY
    ) -> None:
        self._tail = RunTail(paths, policy.look_again_s)
        self._policy = policy
        self._clock = clock
        self._growths: dict[Path, tuple[int, int | None]] = {}
        self._judged: tuple[RunReport, RunContext] | None = None
        self._judge_due_s = 0.0
        self._unjudged = False
        self._which: tuple[str, int] | None = None
        self._states: list[RankState] = []

    def refresh(self) -> LiveView:
        """Read what is new, and return the current state of the run."""
        changed = self._tail.poll()
        try:
            run = self._tail.run()
        except RecordError as error:
            self._judged = None
            return LiveView(waiting=str(error))
        lines = [self._line(record, self._clock()) for record in run.ranks]
        report, run_context = self._judgment(run, [line.state for line in lines], changed)
        start = run.ranks[0].start
        world = max(len(lines), *(record.start.world_size for record in run.ranks))
        return LiveView(
            lines,
            msgspec.structs.replace(
                report,
                steps=max(line.step for line in lines),
                ranks=RankCount(seen=len(lines), of=world),
            ),
            run_context,
            run_id=start.run_id,
            restart=start.restart,
        )

    def _judgment(
        self, run: RunRecord, states: list[RankState], changed: bool
    ) -> tuple[RunReport, RunContext]:
        """Join all ranks again if there is anything new, unless that takes long and was just done."""
        start = run.ranks[0].start
        which = (start.run_id, start.restart)
        self._unjudged = self._unjudged or changed or states != self._states  # a death changes no record
        began = time.monotonic()
        due = self._unjudged and began >= self._judge_due_s
        if self._judged is None or which != self._which or due:
            live = "running" in states or "silent" in states
            report = merge(run, live=live)
            self._judged = report, context(run, report, live=live)
            self._which, self._states, self._unjudged = which, states, False
            now = time.monotonic()
            self._judge_due_s = now + (now - began) / self._policy.judge_share
        return self._judged

    def _line(self, record: RankRecord, now: float) -> RankLine:
        tail = self._tail.tails[record.path]
        mark = main_mark(tail)
        device = None if mark is None else mark.device
        last_at = None if record.start.time is None else record.start.time + record.last_time_s
        age_s = None if last_at is None else max(0.0, now - last_at)
        return RankLine(
            rank=record.start.rank,
            host=record.start.host,
            device=device,
            step=record.last_step,
            allocated=None if mark is None else mark.allocated,
            reserved=None if mark is None else mark.reserved,
            peak=_peak(tail, device),
            stranded=_stranded(record, device),
            host_rss=_host_rss(record, tail),
            growth=self._growth(tail, device),
            last_mark=None if tail.last is None else tail.last.name,
            age_s=age_s,
            state=_state(record, age_s),
            verdict=None if record.end is None else record.end.verdict,
        )

    def _growth(self, tail: RankTail, device: str | None) -> int | None:
        """The growth from step to step; only computed again if there are new marks."""
        if device is None:
            return None
        version, growth = self._growths.get(tail.path, (-1, None))
        if version != tail.version:
            growth = None
            marks = [mark for mark in tail.course("step", device) if mark.allocated is not None]
            settled = [(mark.step, mark.allocated or 0) for mark in marks[WARM_UP:]]
            recent = settled[-max(FEWEST, len(settled) // 2) :]
            rate, policy = floor_rise(recent), policy_of(device)
            if rate is not None:
                grown = rate * (recent[-1][0] - recent[0][0])
                growth = round(rate) if rate >= policy.least and grown >= policy.settles else 0
            self._growths[tail.path] = (tail.version, growth)
        return growth


def main_mark(tail: RankTail) -> Mark | None:
    """The last mark of a rank's fullest device, a GPU before the CPU; None before the first mark."""
    marks = tail.latest.values()
    return max(marks, key=lambda mark: (mark.device.startswith("cuda"), mark.allocated or 0), default=None)


def _peak(tail: RankTail, device: str | None) -> int | None:
    if device is None:
        return None
    end = tail.record.end
    own = None if end is None else end.peak_allocated.get(device)
    return tail.peaks.get(device) if own is None else own


def _stranded(record: RankRecord, device: str | None) -> int | None:
    ledger = record.ledgers.get(device or "")
    return None if ledger is None or ledger.device == "host" else rows_of(ledger).get(STRANDED, 0)


def _host_rss(record: RankRecord, tail: RankTail) -> int | None:
    if tail.last is not None and tail.last.host_rss is not None:
        return tail.last.host_rss
    return record.host[-1].rss if record.host else None


def _state(record: RankRecord, age_s: float | None) -> RankState:
    if record.end is not None:
        return "ended"
    if record.alive is None:
        return "running" if age_s is not None and age_s < SILENT_AFTER_S else "silent"
    return "running" if record.alive else "killed"
