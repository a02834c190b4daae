"""The verdict on jobs that run already, from what can be read from outside.

Nothing in a job is changed: the kernel counts its memory, and `memtriage.outside.census` reads its censuses.
A job that listens is asked for them instead. Growth is judged over seconds, by the rules of a watched run.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, get_args

import msgspec

from memtriage.account.process_ledger import gpu_rows
from memtriage.diagnose.growth.counter import Counters, WatchedCounter
from memtriage.diagnose.growth.history import HolderHistory, Holding
from memtriage.diagnose.growth.holders import HolderGrowth, growths
from memtriage.diagnose.growth.judged import judge_counter, weakest
from memtriage.diagnose.growth.leaks import CensusPoint
from memtriage.diagnose.growth.proof import BY_TIME
from memtriage.diagnose.judge import ScaleEvidence, holder_finding, unnamed_growth
from memtriage.diagnose.ranks.merge import RunContext
from memtriage.diagnose.verdict import verdict
from memtriage.model.blocks import DeviceCounters
from memtriage.model.census import Census, GroupDetail, GroupKey
from memtriage.model.findings import Finding
from memtriage.model.judged import Judged
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.paths import is_native
from memtriage.model.position import TrainingPosition
from memtriage.model.report import RankCount, RunReport
from memtriage.model.units import count
from memtriage.observe.driver import process_memory
from memtriage.observe.host import kib_fields, memory_classes, text_of
from memtriage.observe.smaps import MappingClass
from memtriage.outside.answer import arguments
from memtriage.outside.census import OutsideCensus, take_census
from memtriage.outside.cuda_allocator import CudaAllocator, allocator_of
from memtriage.outside.memory import GoneError, OtherBuildError, OutsideError
from memtriage.process.stdlib import os, time
from memtriage.session.job_ranks import environment_of, rank_of
from memtriage.session.remote.ask import AskError, ask

_CPU: Final = "cpu"
_KERNEL: Final = "host"
"""The policy by which resident memory is judged."""


@dataclass(frozen=True, slots=True)
class AttachPolicy:
    """How often a job is read.

    Attributes:
        censuses: in the whole time. A GPU is judged by twelve, and some are late.
        share: part of the time that reading may take: the reader keeps a processor busy meanwhile.
        pauses: part of the time for which a job that listens may wait for its own censuses.
        between_s: seconds between two readings of the kernel's counters.
        answers_s: seconds within which a job that listens must answer.
    """

    censuses: int = 18
    share: float = 0.5
    pauses: float = 0.05
    between_s: float = 0.2
    answers_s: float = 60.0


POLICY: Final = AttachPolicy()


@dataclass(slots=True)
class Attached:
    """One job, and what was read of it so far.

    Attributes:
        pid: its process.
        rank: its rank; None where it has none.
        resident: anonymous memory of the process, resident or swapped out, over seconds.
        held: by device, over seconds: bytes that torch's CUDA allocator has handed out; of a device without
            its statistics, bytes of the storages of each census.
        history: its holders from census to census.
        details: what is known of the holders of the last census.
        last: the last census; None before the first.
        allocator: statistics of its CUDA allocator; None where it has none that can be read.
        allocated: the last ones, by device.
        ledgers: those of its last answer, where it listens.
        ended: why nothing more can be read of it; None while it runs.
    """

    pid: int
    rank: int | None = None
    resident: WatchedCounter = field(default_factory=lambda: WatchedCounter(_KERNEL))
    held: Counters = field(default_factory=Counters)
    history: HolderHistory = field(default_factory=HolderHistory)
    details: dict[GroupKey, GroupDetail] = field(default_factory=dict)
    last: OutsideCensus | None = None
    allocator: CudaAllocator | None = None
    allocated: dict[str, DeviceCounters] = field(default_factory=dict)
    ledgers: list[Ledger] = field(default_factory=list)
    ended: str | None = None

    def read_counters(self, now: float) -> None:
        """Add a reading of what the kernel counts, at so many seconds since the start."""
        sizes = kib_fields(text_of(Path(f"/proc/{self.pid}/status")))
        if "RssAnon" not in sizes:  # also of a zombie
            self.ended = f"process {self.pid} ended"
        else:
            self.resident.add(now, sizes["RssAnon"] + sizes.get("VmSwap", 0))
        if self.allocator is not None:
            self.allocated |= self.allocator.counters()
            for device, counters in self.allocated.items():
                if counters.allocated is not None:
                    self.held.setdefault(device, WatchedCounter(device)).add(now, counters.allocated)

    def find_allocator(self) -> None:
        """Look for the statistics of its CUDA allocator, which is there once it uses a GPU."""
        if self.allocator is None:
            found = allocator_of(self.pid)
            if found is not None and found.counters():
                self.allocator = found

    def add(self, census: OutsideCensus, now: float) -> None:
        """Add a census that was read at so many seconds since the start."""
        self.last = census
        totals: dict[str, int] = {}
        for group in census.groups:
            totals[group.device] = totals.get(group.device, 0) + group.nbytes
        for device in {*totals, *self.held, _CPU} - self.allocated.keys():
            self.held.setdefault(device, WatchedCounter(device)).add(now, totals.get(device, 0))
        taken = Census(
            storages=census.storages, groups=census.groups, nodes_by_anchor={}, objects=census.objects,
            nodes=census.nodes, seconds=census.seconds,
        )  # fmt: skip
        self.history.add(CensusPoint(now, taken))
        self.details |= census.details

    # --- the judgment ---

    def growing(self, now: float) -> list[HolderGrowth]:
        """Return the holders that grew up to the last census, largest growth first."""
        return growths(
            self.history.growing(), _device_of, self.held.contradicts, None, now, self.held.confirms,
            self.held.ended, self.held.rose, policy=BY_TIME,
        )  # fmt: skip

    def findings(self, now: float) -> list[Finding]:
        """Return what grows, largest first, and growth that no holder explains."""
        estimates = {device: counter.estimate() for device, counter in self.held.items()}
        evidence = ScaleEvidence("second", TrainingPosition(time_s=now), estimates)
        found = []
        for growth in self.growing(now):
            if is_native(growth.holding.group.anchor):
                continue
            detail = self.details.get(growth.holding.key, GroupDetail())
            finding = holder_finding(growth, detail, evidence)
            if finding is not None:
                found.append(finding)
        for device, counter in {_CPU: self.resident, **self._allocators()}.items():
            of = ScaleEvidence("second", TrainingPosition(time_s=now), {device: counter.estimate()})
            unnamed = unnamed_growth(device, of, found, None, False)
            if unnamed is not None:
                found.append(unnamed)
        return [msgspec.structs.replace(finding, rank=self.rank, step=None) for finding in found]

    def _allocators(self) -> dict[str, WatchedCounter]:
        return {device: self.held[device] for device in self.allocated if device in self.held}

    def judged(self) -> dict[str, Judged]:
        """Return by device what the judgment rests on.

        The host is judged by what the kernel counts, a GPU by what torch's allocator has handed out, or by
        its tensors in the censuses.
        """
        counters = {**self.held, _CPU: self.resident}
        return {device: _judge(counter) for device, counter in sorted(counters.items())}

    def ledger(self) -> dict[str, list[LedgerRow]]:
        """Return the memory of the process on each GPU by use and owner, and the host's by class."""
        visible = environment_of(self.pid).get(b"CUDA_VISIBLE_DEVICES")
        in_use = process_memory(self.pid, None if visible is None else os.fsdecode(visible))
        owners = self._owners()
        devices = sorted((owners.keys() | self.allocated.keys() | in_use.keys()) - {_CPU})
        rows = {
            device: gpu_rows(owners.get(device, {}), self.allocated.get(device), in_use.get(device))
            for device in devices
        }
        rows |= {ledger.device: ledger.rows for ledger in self.ledgers}
        classes = memory_classes(Path(f"/proc/{self.pid}"))
        if classes is not None:
            rows["host"] = [
                LedgerRow(row=kind, bytes=nbytes)
                for kind in get_args(MappingClass)
                if (nbytes := classes.resident(kind))
            ]
        return rows

    def _owners(self) -> dict[str, dict[str, int]]:
        owners: dict[str, dict[str, int]] = {}
        for group in [] if self.last is None else self.last.groups:
            of = owners.setdefault(group.device, {})
            for owner, nbytes in group.owners.items():
                of[owner] = of.get(owner, 0) + nbytes
        return owners


def _device_of(holding: Holding) -> str:
    return holding.group.device


def _judge(counter: WatchedCounter) -> Judged:
    growth, judged = judge_counter(counter.track, "time", counter.policy)
    if growth.state != "too_short":
        return judged
    few = f"{count(judged.points, 'reading')} of {counter.policy.readings}: attach for a longer time"
    return msgspec.structs.replace(judged, reason=few)


def attach(
    pids: Sequence[int], seconds: float, say: Callable[[str], None] = lambda line: None
) -> tuple[RunReport, RunContext]:
    """Follow jobs from outside, and judge them.

    Args:
        pids: processes of one job: its ranks.
        seconds: how long.
        say: takes one line about a process of which nothing more can be read.

    Returns:
        The report, and what a person wants to know beside it, such as what could not be read.

    Raises:
        OtherBuildError: one has another build of Python or torch.
        OutsideError: none of them can be read. The text is one line for the user.
    """
    jobs = [Attached(pid, rank_of(pid) if len(pids) > 1 else None) for pid in pids]
    began = time.monotonic()
    due = 0.0
    while (now := time.monotonic() - began) < seconds:
        running = [job for job in jobs if job.ended is None]
        if not running:
            break
        for job in running:
            job.read_counters(now)
        if now >= due:
            for job in running:
                _read(job, began, say)
            took = time.monotonic() - began - now
            paused = max((job.last.stopped_s for job in running if job.last is not None), default=0.0)
            due = now + _until_next(seconds, took, paused)
        time.sleep(min(POLICY.between_s, max(0.0, seconds - now)))
    now = time.monotonic() - began
    seen = [job for job in jobs if job.last is not None]
    if not seen:
        raise OutsideError("; ".join(job.ended or f"process {job.pid} gave no census" for job in jobs))
    report = _report(seen, len(jobs), now)
    context = RunContext(
        argv=arguments(pids[0]), duration_s=seconds, ledger_rank=seen[0].rank,
        runs_out_in=[None] * len(report.findings), notes=_notes(jobs, now),
    )  # fmt: skip
    return report, context


def _until_next(seconds: float, took: float, paused: float) -> float:
    """Return the seconds from one census to the next: enough of them, and few enough for reader and job.

    Args:
        seconds: how long the jobs are followed.
        took: seconds that reading took.
        paused: seconds for which a job waited.
    """
    return max(seconds / POLICY.censuses, took / POLICY.share, paused / POLICY.pauses)


def _read(job: Attached, began: float, say: Callable[[str], None]) -> None:
    asked = _asked(job)
    if asked is not None:
        job.add(asked, asked.at - began)
        return
    try:
        census = take_census(job.pid, twice=False)
        job.find_allocator()
    except GoneError as error:
        job.ended = str(error)
    except OtherBuildError:
        raise
    except OutsideError as error:
        job.ended = str(error)
        say(str(error))
    else:
        job.add(census, census.at - began)


def _asked(job: Attached) -> OutsideCensus | None:
    """Return the census that a job takes itself; None where it does not listen, or gives none."""
    try:
        answer = ask(job.pid, POLICY.answers_s, follow=True)
    except AskError:
        return None
    if answer.refused is not None or not answer.groups:
        return None
    job.ledgers = answer.ledgers
    groups = [msgspec.structs.replace(group, by_path={group.path: group.nbytes}) for group in answer.groups]
    keys = [group.key for group in groups]
    return OutsideCensus(
        groups=groups, storages=[], details=dict(zip(keys, answer.details, strict=True)), at=time.monotonic(),
        objects=answer.objects, nodes=answer.nodes, moved=None, moved_bytes=0, seconds=answer.paused_s,
        stopped_s=answer.paused_s, notes=["it listens, and took its censuses itself", *answer.notes],
    )  # fmt: skip


def _report(jobs: Sequence[Attached], of: int, now: float) -> RunReport:
    findings = [finding for job in jobs for finding in job.findings(now)]
    findings.sort(key=lambda finding: (finding.certainty == "suspected", -(finding.bytes or 0)))
    by_device: dict[str, list[Judged]] = {}
    for job in jobs:
        for device, judged in job.judged().items():
            by_device.setdefault(device, []).append(judged)
    judged_by_device = {device: weakest(all_judged) for device, all_judged in by_device.items()}
    return RunReport(
        verdict=verdict(findings, False, judged_by_device),
        steps=0,
        findings=findings,
        marks=[],
        ledger=jobs[0].ledger(),
        judged=judged_by_device,
        ranks=RankCount(seen=len(jobs), of=of),
    )


def _notes(jobs: Sequence[Attached], now: float) -> list[str]:
    notes = [f"read from outside on {socket.gethostname()} for {math.ceil(now)} s; steps are not seen there"]
    for job in jobs:
        name = f"process {job.pid}" if job.rank is None else f"rank {job.rank} (process {job.pid})"
        if job.ended is not None:
            notes.append(f"{name}: {job.ended}")
        if job.last is not None:
            notes += [f"{name}: {note}" for note in job.last.notes]
    return notes
