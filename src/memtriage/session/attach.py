"""The verdict on jobs that run already, from what can be read from outside.

Nothing in a job is changed: the kernel counts its memory, and `memtriage.outside.census` reads its censuses.
A job that listens is asked for them instead. Growth is judged over seconds, by the rules of a watched run.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, get_args

import msgspec

from memtriage.account.process_ledger import gpu_rows
from memtriage.diagnose.growth.evidence import ENOUGH_MARKS, Comparison, Evidence
from memtriage.diagnose.growth.judgment import judge
from memtriage.diagnose.ranks.merge import RunContext
from memtriage.diagnose.verdict import verdict, weakest
from memtriage.model.evidence import Situation
from memtriage.model.findings import Finding
from memtriage.model.judged import Judged
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.position import TrainingPosition
from memtriage.model.report import RankCount, RunReport
from memtriage.model.units import MIB, count, rate, size
from memtriage.observe.driver import process_memory
from memtriage.observe.host import memory_classes
from memtriage.observe.process_tree import sizes_of
from memtriage.observe.smaps import MappingClass
from memtriage.outside.answer import arguments
from memtriage.outside.census import JobReader, OutsideCensus, RemoteReading, joined
from memtriage.outside.followed import FollowedOutside, totals
from memtriage.outside.memory import GoneError, OtherBuildError, OutsideError
from memtriage.process.stdlib import os, time
from memtriage.report.growth_words import findings_of, judged_in_words
from memtriage.session.job_ranks import environment_of, rank_of
from memtriage.session.remote.ask import AskError, ask
from memtriage.session.remote.socket_path import socket_of

_CPU: Final = "cpu"


@dataclass(frozen=True, slots=True)
class AttachPolicy:
    """How often a job is read.

    Attributes:
        censuses: in the whole time. A GPU is judged by twelve, and some are late.
        share: part of a processor's time that reading may take.
        first: censuses of the program's own holders before the first one of all of it.
        whole: what libraries and C++ hold is read again after so many times the seconds that this took.
        longer: how much longer that may take than a census of the program's own holders: it took 15 times the
            processor's time. It is given up after half of the time that is left.
        pauses: part of the time for which a job that listens may wait for its own censuses.
        between_s: seconds between two readings of the kernel's counters.
        answers_s: seconds within which a job that listens must answer.
        rate, of_size: growth that must show, in bytes per second or as a part of the resident memory.
        large, needed_s: seconds that are needed for that, up to so many bytes of resident memory and above.
    """

    censuses: int = 18
    share: float = 0.5
    first: int = 4
    whole: float = 4.0
    longer: float = 24.0
    pauses: float = 0.05
    between_s: float = 0.2
    answers_s: float = 60.0
    rate: int = 2 * MIB
    of_size: float = 0.01 / 60
    large: int = 2048 * MIB
    needed_s: tuple[int, int] = (20, 60)


POLICY: Final = AttachPolicy()


@dataclass(slots=True)
class Attached:
    """One job, and what was read of it so far.

    Attributes:
        pid: its process.
        rank: its rank; None where it has none.
        evidence: over seconds. Of the CPU: anonymous memory of the process, resident or swapped out; of a
            GPU: bytes of the storages of each census.
        reader: reads it from outside; None where it listens.
        reading: the last one of all of it, before that the first one.
        censuses, took_s: how many were read; the seconds that the last one of the program's holders took.
        next_whole: when all of it is to be read again.
        holders: numbers its holders from census to census.
        last: the last census, of all of it once there is one; None before the first.
        ledgers: those of its last answer, where it listens.
        ended: why nothing more can be read of it; None while it runs.
    """

    pid: int
    rank: int | None = None
    evidence: Evidence = field(default_factory=Evidence)
    reader: JobReader | None = None
    reading: RemoteReading | None = None
    censuses: int = 0
    took_s: float = 0.0
    next_whole: float = 0.0
    holders: FollowedOutside = field(default_factory=FollowedOutside)
    last: OutsideCensus | None = None
    ledgers: list[Ledger] = field(default_factory=list)
    ended: str | None = None

    def __post_init__(self) -> None:
        self.seconds.outside = True

    @property
    def seconds(self) -> Comparison:
        """Its counters and censuses."""
        return self.evidence.run["second"]

    @property
    def resident(self) -> int:
        """Bytes of the last reading of its anonymous memory."""
        track = self.seconds.tracks.get(_CPU)
        return 0 if track is None or track.last is None else track.last[1]

    def read_counters(self, now: float) -> None:
        """Add a reading of what the kernel counts, at so many seconds since the start."""
        sizes = sizes_of(self.pid)
        if sizes is None:  # also of a zombie
            self.ended = f"process {self.pid} ended"
        else:
            self.seconds.read(now, {_CPU: sizes.anonymous})

    def add(self, census: OutsideCensus, now: float, *, program_only: bool = False) -> None:
        """Add a census that was read at so many seconds since the start.

        Args:
            census: of all of it.
            now: seconds.
            program_only: of the program's own holders alone.
        """
        if not program_only or self.last is None:
            self.last = census
        if not program_only:
            sizes = totals(census.groups)
            for device in {*sizes, *self.seconds.tracks} - {_CPU}:
                self.seconds.read(now, {device: sizes.get(device, 0)})
        self.evidence.add(self.holders.add(census, now, program_only=program_only))

    def open(self) -> None:
        """Make ready to read it from outside, which takes seconds, unless it listens.

        Raises:
            OutsideError: it cannot be read.
        """
        if self.reading is None and socket_of(self.pid) is None:
            self.reader = JobReader(self.pid)
            self.reading = self.reader.read(program_only=True)

    def read(self, began: float, until: float = math.inf) -> None:
        """Take a census from outside: of what the program itself holds, and now and then of all of it.

        The first ones are of the program, so that what grows there is seen even if all of it takes long.

        Args:
            began: when positions begin, on the monotonic clock.
            until: when all is to be read.

        Raises:
            OutsideError: it cannot be read.
        """
        self.open()
        reader, before = self.reader, self.reading
        if reader is None or before is None:  # it has come to listen
            return
        started = time.monotonic()
        by_census = bool(self.seconds.tracks.keys() - {_CPU})  # nothing else counts a device
        if whole := by_census or self._is_due(started, until):
            reading = reader.read(within_s=math.inf if by_census else (until - started) / 2)
            self.next_whole = started + (1 + POLICY.whole) * (time.monotonic() - started)
            if reading.partial and not by_census:
                reader.release(reading)
                return
            self.reading = reading
        else:
            reading = reader.read_again(before, gradients=False)
            before.chunks = reading.chunks  # those of classes that are known by now are not needed again
        self.add(joined([reading]), reading.at - began, program_only=not whole)
        reader.release(before if whole else reading)
        self.censuses += 1
        if not whole:
            self.took_s = time.monotonic() - started

    def _is_due(self, now: float, until: float) -> bool:
        """Whether all of it is to be read."""
        in_time = now + POLICY.longer * self.took_s < until
        return in_time and self.censuses >= POLICY.first and now >= self.next_whole

    def judgment(self, now: float) -> tuple[list[Finding], dict[str, Judged]]:
        """Return what grows as far as was read, and by device whether growth could be judged.

        The host is judged by what the kernel counts, a GPU by its tensors in the censuses.
        """
        readable = dict.fromkeys((_CPU, *self.seconds.tracks), True)
        self.evidence.add(Situation(position=TrainingPosition(time_s=now), readable=readable))
        judgment = judge(self.evidence)
        by_device = judged_in_words(judgment.judged)
        for device, judged in by_device.items():
            if judged.points < ENOUGH_MARKS:
                few = f"{count(judged.points, 'reading')} of {ENOUGH_MARKS}: attach for a longer time"
                by_device[device] = msgspec.structs.replace(judged, reason=few)
        cpu, least, needed = by_device[_CPU], _rate_shown(self.resident), _needed_s(self.resident)
        limit = cpu.detection_limit
        span = 0.0 if limit is None else self.evidence.main.counters[_CPU].points.span
        if limit is not None and (limit.bytes > least or span < 0.9 * needed):
            needed = max(needed, 10 * math.ceil(span * limit.bytes / least / 10))
            reason = f"growth of {rate(least, 'second')} may not show in {span:.0f} s: use --for {needed}s"
            by_device[_CPU] = msgspec.structs.replace(cpu, detection_limit=None, reason=reason)
        return findings_of(judgment.leaks, self.rank), by_device

    def ledger(self) -> dict[str, list[LedgerRow]]:
        """Return the memory of the process on each GPU by use and owner, and the host's by class."""
        visible = environment_of(self.pid).get(b"CUDA_VISIBLE_DEVICES")
        in_use = process_memory(self.pid, None if visible is None else os.fsdecode(visible))
        owners: dict[str, dict[str, int]] = {}
        for group in [] if self.last is None else self.last.groups:
            of = owners.setdefault(group.device, {})
            for owner, nbytes in group.owners.items():
                of[owner] = of.get(owner, 0) + nbytes
        devices = sorted((owners.keys() | in_use.keys()) - {_CPU})
        rows = {device: gpu_rows(owners.get(device, {}), in_use.get(device)) for device in devices}
        rows |= {ledger.device: ledger.rows for ledger in self.ledgers}
        classes = memory_classes(Path(f"/proc/{self.pid}"))
        if classes is not None:
            rows["host"] = [
                LedgerRow(row=kind, bytes=nbytes)
                for kind in get_args(MappingClass)
                if (nbytes := classes.resident(kind))
            ]
        return rows


def _rate_shown(resident: int) -> int:
    """Return the growth that must show, in bytes per second, by the resident memory."""
    return max(POLICY.rate, round(POLICY.of_size * resident))


def _needed_s(resident: int) -> int:
    """Return the seconds that are needed for that."""
    return POLICY.needed_s[resident > POLICY.large]


def attach(
    pids: Sequence[int], seconds: float, say: Callable[[str], None] = lambda line: None
) -> tuple[RunReport, RunContext]:
    """Follow jobs from outside, and judge them.

    Args:
        pids: processes of one job: its ranks.
        seconds: how long.
        say: takes one line: how long is needed for a process, or that nothing more can be read of it.

    Returns:
        The report, and what a person wants to know beside it, such as what could not be read.

    Raises:
        OtherBuildError: one has another build of Python or torch.
        OutsideError: none of them can be read. The text is one line for the user.
    """
    jobs = [Attached(pid, rank_of(pid) if len(pids) > 1 else None) for pid in pids]
    for job in jobs:
        _attempt(job, job.open, say)
    began = time.monotonic()
    for job in jobs:
        job.read_counters(0.0)
        if job.resident:
            say(_needed(job.pid, job.resident))
    due = 0.0
    with _counting(jobs, began):
        while (now := time.monotonic() - began) < seconds or not due:  # one census at least
            running = [job for job in jobs if job.ended is None]
            if not running:
                break
            if now >= due:
                used = time.process_time()
                for job in running:
                    _read(job, began, began + seconds, say)
                took = time.process_time() - used
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


def _needed(pid: int, resident: int) -> str:
    needed, least = _needed_s(resident), rate(_rate_shown(resident), "second")
    return f"process {pid} has {size(resident)}: growth of {least} shows within {needed} s"


@contextlib.contextmanager
def _counting(jobs: Sequence[Attached], began: float) -> Iterator[None]:
    """Read the counters of jobs on time, whatever a census does meanwhile; release the copies at the end."""
    ended = threading.Event()

    def count_on() -> None:
        while not ended.wait(POLICY.between_s):
            for job in jobs:
                if job.ended is None:
                    job.read_counters(time.monotonic() - began)

    thread = threading.Thread(target=count_on, name="memtriage counters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for job in jobs:
            if job.reader is not None:
                job.reader.close()


def _until_next(seconds: float, took: float, paused: float) -> float:
    """Return the seconds from one census to the next: enough of them, and few enough for reader and job.

    Args:
        seconds: how long the jobs are followed.
        took: seconds of processor time that reading took.
        paused: seconds for which a job waited.
    """
    return max(seconds / POLICY.censuses, took / POLICY.share, paused / POLICY.pauses)


def _read(job: Attached, began: float, until: float, say: Callable[[str], None]) -> None:
    asked = _asked(job)
    if asked is not None:
        job.add(asked, asked.at - began)
        return
    _attempt(job, partial(job.read, began, until), say)


def _attempt(job: Attached, read: Callable[[], None], say: Callable[[str], None]) -> None:
    try:
        read()
    except GoneError as error:
        job.ended = str(error)
    except OtherBuildError:
        raise
    except OutsideError as error:
        job.ended = str(error)
        say(str(error))


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
        objects=answer.objects, nodes=answer.nodes, moved=None, seconds=max(answer.took_s, answer.paused_s),
        stopped_s=answer.paused_s, missing=[],
        notes=["it listens, and took its censuses itself", *answer.notes],
    )  # fmt: skip


def _report(jobs: Sequence[Attached], of: int, now: float) -> RunReport:
    judgments = [job.judgment(now) for job in jobs]
    findings = [finding for found, _ in judgments for finding in found]
    findings.sort(key=lambda finding: (finding.certainty == "suspected", -(finding.bytes or 0)))
    by_device: dict[str, list[Judged]] = {}
    for _, judged_devices in judgments:
        for device, judged in judged_devices.items():
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
