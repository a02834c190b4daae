"""Reading records back: one rank, or one run over all its ranks.

A record may be cut (the process was killed) or hold lines of a newer memtriage: what can be read is read,
what cannot is counted. Only a path without any record at all is an error.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import socket
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from memtriage.model.evidence import CensusSeen, EvidenceLine, Readings, Role, Situation
from memtriage.model.findings import Finding
from memtriage.model.ledger import Ledger
from memtriage.model.marks import Mark
from memtriage.process.collector import collector_paused
from memtriage.store.locate import RecordError, newest_records, open_record
from memtriage.store.records import EVIDENCE, UNREADABLE, End, HostSampleLine, Note, Start

T = TypeVar("T")

_STALE_AFTER_S: Final = 600.0
"""A rank that fell silent this long before another one started belongs to an earlier run (clocks of nodes
differ, and nodes of one run start minutes apart)."""
_READERS: Final = 4
_GZIP: Final = b"\x1f\x8b"
_LARGEST: Final = 1 << 30
"""Bytes of a bundle that are read: a file made to fill memory must not."""
_FILES_AHEAD: Final = 16
"""Files read before they are needed; 4 MB each for the longest watch's usual record."""


@dataclass(slots=True)
class RankRecord:
    """What one rank wrote in its last run.

    Attributes:
        path: the file.
        start: its first line; all defaults when that line cannot be read.
        marks, host, notes: in the order written.
        ledgers: the last one of each device, by device.
        census_steps: optimizer steps at whose end a census was taken, which takes time of the next.
        evidence: what growth is judged from, in the order written; empty in records of schema 1.
        end: None when the process was killed or still runs.
        cut_lines: lines that were cut or garbled.
        alive: whether the process still runs; None when that cannot be known from this machine.
    """

    path: Path
    start: Start = field(default_factory=Start)
    marks: list[Mark] = field(default_factory=list)
    host: list[HostSampleLine] = field(default_factory=list)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    census_steps: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    evidence: list[EvidenceLine] = field(default_factory=list)
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
        """Bytes that the process's allocator may have of each device, as far as known at its end."""
        return {} if self.end is None else self.end.device_limits

    @property
    def last_time_s(self) -> float:
        """Seconds from the start of the watch to the last line that has a time."""
        times = [line.time_s for line in (self.end, *self.marks[-1:], *self.host[-1:]) if line is not None]
        return max((time_s for time_s in times if time_s is not None), default=0.0)


@dataclass(slots=True)
class RunRecord:
    """The ranks of one run, by rank, and what had to be left out when reading them."""

    ranks: list[RankRecord]
    notes: list[str] = field(default_factory=list)


def read_run(paths: Sequence[Path], *, ahead: bool = False) -> RunRecord:
    """Read the newest run below `paths`: its newest restart, all its ranks.

    Args:
        paths: each the directory of all runs, of a run, of a restart, or one rank's file. Several are the
            node-local directories of one run.
        ahead: read the files of many ranks in threads, while others are decoded. Not for a process that has
            run out of memory: there `Thread.start` may wait for ever.

    Raises:
        RecordError: a path does not exist, holds no record, or nothing in it can be read.
    """
    files = newest_records(paths)
    read = _read_ahead(files) if ahead else ((file, _contents(file)) for file in files)
    with collector_paused():  # a million marks form no cycles, and would be walked again and again
        ranks = [record for file, data in read for record in _records(file, data)]
    readable = [rank for rank in ranks if is_readable(rank)]
    if not readable:
        raise RecordError(
            f"{' '.join(map(str, paths))}: no readable record ({len(files)} empty or garbled files)"
        )
    notes = [f"{rank.path} holds no readable line: ignored" for rank in ranks if not is_readable(rank)]
    kept, dropped = one_run(readable)
    kept.sort(key=lambda rank: rank.number)
    return RunRecord(ranks=kept, notes=notes + dropped)


def read_rank(path: Path) -> RankRecord:
    """Read one rank's record. When several runs wrote the same file, the last one counts.

    Raises:
        RecordError: the file cannot be read at all.
    """
    return _records(path, _contents(path))[-1]


def _records(path: Path, data: bytes) -> list[RankRecord]:
    """Return the ranks of a file: one, or in a bundle several. Of each the last run counts."""
    record = RankRecord(path)
    ranks: dict[int | None, RankRecord] = {}
    view = memoryview(data)
    spans = _other_lines(data)
    others = [data[start:end].lstrip(b"\n") for start, end in spans]
    marks: list[bytes | memoryview] = []
    done = 0
    for (start, end), line, kind in zip(spans, others, _kinds(others), strict=True):
        marks.append(view[done:start])
        done = end
        if kind == "mark":
            marks.append(line)
        elif kind == "start" and (first := _decode(_START, line)) is not None:
            _add_marks(record, marks)
            record = RankRecord(path, start=first)
            ranks.pop(first.rank, None)  # the last run is the last of the file
            ranks[first.rank] = record
            marks = []
        elif line:
            take_line(record, kind, line)
    marks.append(view[done:])
    _add_marks(record, marks)
    return list(ranks.values()) or [record]


def _add_marks(record: RankRecord, marks: list[bytes | memoryview]) -> None:
    record.marks, cut = decode_marks(b"\n".join(marks))
    record.cut_lines += cut
    if record.start == Start() and record.marks:
        record.start.rank = record.marks[0].rank
    record.alive = is_alive(record.start)


def _other_lines(data: bytes) -> list[tuple[int, int]]:
    """Return where the lines are that are no marks as `RankWriter` writes them, with the line break before.

    Nearly all lines are marks, and thousands of ranks have millions: what is between these is decoded in one
    call, without a step of Python for each.
    """
    spans = [match.span() for match in _OTHER_LINE.finditer(data)]
    if not data.startswith(_MARK_PREFIXES):
        end = data.find(b"\n")
        spans.insert(0, (0, len(data) if end < 0 else end))
    return spans


def is_readable(record: RankRecord) -> bool:
    """Return whether any line of a record that matters could be read."""
    return bool(record.start != Start() or record.marks or record.end)


def _contents(path: Path) -> bytes:
    try:
        with open_record(path) as file:
            data = file.read()
        if data[:2] != _GZIP:
            return data
        with gzip.open(io.BytesIO(data)) as bundle:
            return bundle.read(_LARGEST)
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _read_ahead(files: Sequence[Path]) -> Iterator[tuple[Path, bytes]]:
    """Yield the files' contents, a few of them read while an earlier one is decoded.

    On a shared file system opening a file takes longer than decoding it, and so it does on a cold disk.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="memtriage-reader") as readers:
        coming = deque((file, readers.submit(_contents, file)) for file in files[:_FILES_AHEAD])
        for later in range(_FILES_AHEAD, len(files) + _FILES_AHEAD):
            if not coming:
                return
            file, contents = coming.popleft()
            data = contents.result()
            if later < len(files):
                coming.append((files[later], readers.submit(_contents, files[later])))
            yield file, data


# Lines


class _Kind(msgspec.Struct):
    t: str


class _Final(msgspec.Struct):
    final: bool = False


_MARK_PREFIXES: Final = (b'{"t":"mark",', b'{"t": "mark",')  # as RankWriter writes it, and as `json` would
_OTHER_LINE: Final = re.compile(rb'\n(?!\{"t": ?"mark",)[^\n]*')
_KIND: Final = msgspec.json.Decoder(_Kind)
_START: Final = msgspec.json.Decoder(Start)
_MARK: Final = msgspec.json.Decoder(Mark)
_FINAL: Final = msgspec.json.Decoder(_Final)
_OTHERS: Final[dict[str, msgspec.json.Decoder[msgspec.Struct]]] = {
    "host": msgspec.json.Decoder(HostSampleLine),
    "finding": msgspec.json.Decoder(Finding),
    "ledger": msgspec.json.Decoder(Ledger),
    "note": msgspec.json.Decoder(Note),
    "end": msgspec.json.Decoder(End),
    **{kind: msgspec.json.Decoder(line) for line, kind in EVIDENCE.items()},
}
"""Of the lines that are neither a mark nor a start, by type."""


def _kinds(lines: list[bytes]) -> list[str | None]:
    """Return the types of lines, in one call where all of them are records; of an empty line the empty text.

    Records that were not written by `RankWriter` can have their type in another place.
    """
    filled = list(filter(None, lines))
    try:
        heads = _KIND.decode_lines(b"\n".join(filled))
    except UNREADABLE:
        heads = []
    if len(heads) != len(filled):  # garbled lines, or blanks, which are passed over
        return [line_kind(line) if line else "" for line in lines]
    kinds = iter(heads)
    return [next(kinds).t if line else "" for line in lines]


def line_kind(line: bytes) -> str | None:
    """Return the type of a line; None when the line is not a record."""
    head = _decode(_KIND, line)
    return None if head is None else head.t


def _decode(decoder: msgspec.json.Decoder[T], line: bytes) -> T | None:
    try:
        return decoder.decode(line)
    except UNREADABLE:
        return None


def decode_marks(lines: bytes) -> tuple[list[Mark], int]:
    """Return the marks and how many lines are no mark."""
    try:
        return _MARK.decode_lines(lines), 0
    except UNREADABLE:
        decoded = [_decode(_MARK, line) for line in lines.split(b"\n") if line]
        marks = [mark for mark in decoded if mark is not None]
        return marks, len(decoded) - len(marks)


def take_line(record: RankRecord, kind: str | None, line: bytes) -> None:
    """Add a line that is neither a mark nor a start. An unknown type is left out, a garbled line counted."""
    decoder = None if kind is None else _OTHERS.get(kind)
    match None if decoder is None else _decode(decoder, line):
        case HostSampleLine() as sample:
            record.host.append(sample)
        case Finding() as finding:
            final = _decode(_FINAL, line)
            if final is not None and final.final:
                record.final_findings.append(finding)
            else:
                _update(record.interim_findings, finding)
        case Ledger() as ledger:
            record.ledgers[ledger.device] = ledger
            if ledger.step is not None:
                record.census_steps.add(ledger.step)
        case Note() as note:
            record.notes.append(note.text)
        case End() as end:
            record.end = end
        case Readings() | CensusSeen() | Situation() | Role() as evidence:
            record.evidence.append(evidence)
        case None if decoder is not None or kind in (None, "start"):
            record.cut_lines += 1


def _update(findings: list[Finding], newer: Finding) -> None:
    """Replace the earlier report of the same cause, or add it."""
    for index, known in enumerate(findings):
        if _cause(known) == _cause(newer):
            findings[index] = newer
            return
    findings.append(newer)


def _cause(finding: Finding) -> tuple[object, ...]:
    return (finding.kind, finding.device, finding.held_at, finding.allocated_at, finding.phase)


def one_run(records: list[RankRecord]) -> tuple[list[RankRecord], list[str]]:
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


def is_alive(start: Start) -> bool | None:
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
