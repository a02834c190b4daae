"""Reading records back: one rank, or one run over all its ranks.

A record may be cut (the process was killed) or hold lines of a newer memtriage: what can be read is read,
what cannot is counted. Only a path without any record at all is an error.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from memtriage.model import Finding, Ledger, Mark
from memtriage.store.locate import RecordError, newest_records
from memtriage.store.records import End, HostSample, Note, Start

T = TypeVar("T")

_STALE_AFTER_S: Final = 600.0
"""A rank that fell silent this long before another one started belongs to an earlier run (clocks of nodes
differ, and nodes of one run start minutes apart)."""


@dataclass(slots=True)
class RankRecord:
    """What one rank wrote in its last run.

    Attributes:
        path: the file.
        start: its first line; all defaults when that line cannot be read.
        marks, host, notes: in the order written.
        ledgers: the last one of each device, by device.
        end: None when the process was killed or still runs.
        cut_lines: lines that were cut or garbled.
        alive: whether the process still runs; None when that cannot be known from this machine.
    """

    path: Path
    start: Start = field(default_factory=Start)
    marks: list[Mark] = field(default_factory=list)
    host: list[HostSample] = field(default_factory=list)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    end: End | None = None
    cut_lines: int = 0
    alive: bool | None = None
    final_findings: list[Finding] = field(default_factory=list)
    interim_findings: list[Finding] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """The rank's final findings; those known so far when it never came to an end."""
        if self.final_findings or self.end is not None:
            return self.final_findings
        return self.interim_findings

    @property
    def number(self) -> int:
        """The rank; 0 for a process without rank."""
        return self.start.rank or 0

    @property
    def name(self) -> str:
        """The rank in words."""
        return "the process" if self.start.rank is None else f"rank {self.start.rank}"

    @property
    def last_step(self) -> int:
        """Completed optimizer steps, as far as recorded."""
        marked = self.marks[-1].step if self.marks else 0
        return max(marked, self.end.steps if self.end is not None else 0)

    @property
    def device_limits(self) -> dict[str, int]:
        """Bytes that the process's allocator may have of each device, as far as known; better at the end."""
        return self.start.device_limits | (self.end.device_limits if self.end is not None else {})

    @property
    def last_time_s(self) -> float:
        """Seconds from the start of the watch to the last line that tells the time."""
        times = [line.time_s for line in (self.end, *self.marks[-1:], *self.host[-1:]) if line is not None]
        return max((time_s for time_s in times if time_s is not None), default=0.0)


@dataclass(slots=True)
class RunRecord:
    """The ranks of one run, by rank, and what had to be left out when reading them."""

    ranks: list[RankRecord]
    notes: list[str] = field(default_factory=list)


def read_run(paths: Sequence[Path]) -> RunRecord:
    """Read the newest run below `paths`: its newest restart, all its ranks.

    Args:
        paths: each the directory of all runs, of a run, of a restart, or one rank's file. Several are the
            node-local directories of one run.

    Raises:
        RecordError: a path does not exist, holds no record, or nothing in it can be read.
    """
    files = newest_records(paths)
    with _collector_paused():
        ranks = [read_rank(file) for file in files]
    readable = [rank for rank in ranks if rank.start != Start() or rank.marks or rank.end]
    if not readable:
        raise RecordError(f"{_listed(paths)}: no readable record ({len(files)} empty or garbled files)")
    notes = [f"{rank.path} holds no readable line: ignored" for rank in ranks if rank not in readable]
    kept, dropped = _one_run(readable)
    kept.sort(key=lambda rank: rank.number)
    return RunRecord(ranks=kept, notes=notes + dropped)


def read_rank(path: Path) -> RankRecord:
    """Read one rank's record. When several runs wrote the same file, the last one counts.

    Raises:
        RecordError: the file cannot be read at all.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    record = RankRecord(path)
    mark_lines: list[bytes] = []
    for line in data.split(b"\n"):
        if line.startswith(_MARK_PREFIX):  # nearly all lines: decoded below in one call
            mark_lines.append(line)
        elif line:
            kind = _kind(line)
            if kind == "mark":
                mark_lines.append(line)
            elif kind == "start" and (start := _decode(_START, line)) is not None:
                record = RankRecord(path, start=start)
                mark_lines = []
            else:
                _take(record, kind, line)
    record.marks, cut = _decode_marks(mark_lines)
    record.cut_lines += cut
    if record.start == Start() and record.marks:
        record.start.rank = record.marks[0].rank
    record.alive = _is_alive(record.start)
    return record


# Lines


class _Kind(msgspec.Struct):
    t: str


class _Final(msgspec.Struct):
    final: bool = False


_MARK_PREFIX: Final = b'{"t":"mark",'  # as RankWriter writes it
_KIND: Final = msgspec.json.Decoder(_Kind)
_START: Final = msgspec.json.Decoder(Start)
_MARK: Final = msgspec.json.Decoder(Mark)
_HOST: Final = msgspec.json.Decoder(HostSample)
_FINDING: Final = msgspec.json.Decoder(Finding)
_FINAL: Final = msgspec.json.Decoder(_Final)
_LEDGER: Final = msgspec.json.Decoder(Ledger)
_NOTE: Final = msgspec.json.Decoder(Note)
_END: Final = msgspec.json.Decoder(End)


def _kind(line: bytes) -> str | None:
    """Return the type of a line; None when the line is no record at all."""
    head = _decode(_KIND, line)
    return None if head is None else head.t


def _decode(decoder: msgspec.json.Decoder[T], line: bytes) -> T | None:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _decode_marks(lines: list[bytes]) -> tuple[list[Mark], int]:
    """Return the marks and how many lines were none."""
    try:
        return _MARK.decode_lines(b"\n".join(lines)), 0
    except (msgspec.DecodeError, UnicodeDecodeError):
        decoded = [_decode(_MARK, line) for line in lines]
        marks = [mark for mark in decoded if mark is not None]
        return marks, len(lines) - len(marks)


def _take(record: RankRecord, kind: str | None, line: bytes) -> None:
    """Add a line that is neither a mark nor a start. An unknown type is left out, a garbled line counted."""
    match kind:
        case "host" if (sample := _decode(_HOST, line)) is not None:
            record.host.append(sample)
        case "finding" if (finding := _decode(_FINDING, line)) is not None:
            final = _decode(_FINAL, line)
            if final is not None and final.final:
                record.final_findings.append(finding)
            else:
                _update(record.interim_findings, finding)
        case "ledger" if (ledger := _decode(_LEDGER, line)) is not None:
            record.ledgers[ledger.device] = ledger
        case "note" if (note := _decode(_NOTE, line)) is not None:
            record.notes.append(note.text)
        case "end" if (end := _decode(_END, line)) is not None:
            record.end = end
        case None | "start" | "host" | "finding" | "ledger" | "note" | "end":
            record.cut_lines += 1


def _update(findings: list[Finding], newer: Finding) -> None:
    """Replace the earlier report of the same cause, or add it."""
    for index, known in enumerate(findings):
        if _cause(known) == _cause(newer):
            findings[index] = newer
            return
    findings.append(newer)


def _cause(finding: Finding) -> tuple[str | None, ...]:
    return (finding.kind, finding.device, finding.holder, finding.allocated_at, finding.phase)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the cycle collector from walking a million marks again and again; they form no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _one_run(records: list[RankRecord]) -> tuple[list[RankRecord], list[str]]:
    """Return the records of the newest run among `records`, and a note for each one left out.

    Two runs share a directory when the launcher gives them the same name (torchrun without `--rdzv-id`).
    """
    newest = max(records, key=lambda record: record.start.time or 0.0).start
    kept: dict[int | None, RankRecord] = {}
    notes = []
    for record in sorted(records, key=lambda record: record.start.time or 0.0, reverse=True):
        start = record.start
        silent = (start.time or 0.0) + record.last_time_s
        if start.world_size != newest.world_size or silent < (newest.time or 0.0) - _STALE_AFTER_S:
            notes.append(f"{record.path} is of an earlier run: ignored")
        elif start.rank in kept:
            notes.append(f"{record.path} repeats {record.name}: ignored, {kept[start.rank].path} is newer")
        else:
            kept[start.rank] = record
    return list(kept.values()), notes


def _listed(paths: Sequence[Path]) -> str:
    return " ".join(str(path) for path in paths)


def _is_alive(start: Start) -> bool | None:
    """Return whether the recorded process still runs, None when it is another machine's."""
    if start.pid is None or start.host != socket.gethostname():
        return None
    if start.pid == os.getpid():
        return True
    try:
        # The name in parentheses may itself hold spaces and parentheses.
        fields = Path(f"/proc/{start.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        state, started = fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return False
    return state not in "ZX" and start.pid_start in (None, started)
