"""Following records while they are written: what is new is read, nothing is read twice.

A `RankTail` follows one file and keeps a bounded part of it: long courses are thinned, so that a thousand
ranks of a week's run fit into memory. A `RunTail` follows the newest run below some paths, whose ranks may
appear one by one, and goes on with the next restart or run as soon as that begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from memtriage.model.marks import Mark
from memtriage.model.units import MIB
from memtriage.process.collector import collector_paused
from memtriage.store.locate import RecordError, newest_records, open_record, start_time_in
from memtriage.store.reader import (
    RankRecord,
    RunRecord,
    decode_marks,
    is_alive,
    is_readable,
    line_kind,
    one_run,
    take_line,
)
from memtriage.store.records import UNREADABLE, Start

COURSE_POINTS: Final = 128
"""Marks kept of one name on one device; then every second is dropped, and every second that follows."""
_CHUNK: Final = 4 * MIB
_OWN_NAMES: Final = 32
"""Names of marks that have a course of their own; a program that numbers its marks has one for the rest."""
_REST: Final = "other marks"
_HOST_SAMPLES: Final = 8

_START: Final = msgspec.json.Decoder(Start)
_MARK_PREFIX: Final = b'{"t":"mark",'  # as RankWriter writes it


class Course:
    """The marks of one name on one device, thinned evenly when there are many; the latest is always kept."""

    __slots__ = ("_seen", "_stride", "kept", "latest")

    def __init__(self) -> None:
        self.kept: list[Mark] = []
        self.latest: Mark | None = None
        self._stride = 1
        self._seen = 0

    def add(self, mark: Mark) -> None:
        """Takes the next mark."""
        self.latest = mark
        if self._seen % self._stride == 0:
            self.kept.append(mark)
            if len(self.kept) > COURSE_POINTS:
                del self.kept[1::2]
                self._stride *= 2
        self._seen += 1

    def marks(self) -> list[Mark]:
        """Those kept, oldest first, with the latest at the end."""
        if self.latest is None or (self.kept and self.kept[-1] is self.latest):
            return list(self.kept)
        return [*self.kept, self.latest]


class RankTail:
    """Follows one rank's file. Never raises because of what is in it.

    Attributes:
        path: the file.
        version: changes whenever something new was read.
        last: the latest mark of all.
        latest: by device its latest mark that has a figure of what is allocated; not the one at the end, when
            the program's variables are gone.
        peaks: by device the most that was allocated at a mark, in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        self._sorted_at = 0
        self._offset = 0
        self._inode = 0
        self._cut = b""
        self._begin(Start())

    def _begin(self, start: Start) -> None:
        self.record = RankRecord(self.path, start=start)
        self.last: Mark | None = None
        self.latest: dict[str, Mark] = {}
        self.peaks: dict[str, int] = {}
        self._courses: dict[tuple[str, str], Course] = {}

    def read(self) -> bool:
        """Read what is new, at most a few MiB at a time, and return whether anything was.

        A file that was replaced or cut short is read from its beginning again.

        Raises:
            OSError: the file is gone or cannot be read.
        """
        state = os.stat(self.path)
        if state.st_ino != self._inode or state.st_size < self._offset:
            self._inode, self._offset, self._cut = state.st_ino, 0, b""
            self._begin(Start())
        if state.st_size == self._offset:
            return False
        with open_record(self.path) as file:
            file.seek(self._offset)
            data = file.read(_CHUNK)
        self._offset += len(data)
        *lines, self._cut = (self._cut + data).split(b"\n")
        self._take(lines)
        self.version += 1
        return True

    def course(self, name: str, device: str) -> list[Mark]:
        """The marks of one name on a device, thinned when there are many."""
        course = self._courses.get((name, device))
        return [] if course is None else course.marks()

    def as_record(self) -> RankRecord:
        """The rank as `memtriage.store.reader` would give it, with its marks thinned and in order of time."""
        if self._sorted_at != self.version:
            marks = [mark for course in self._courses.values() for mark in course.marks()]
            marks.sort(key=lambda mark: mark.time_s)
            self.record.marks, self._sorted_at = marks, self.version
        if self.record.end is None:
            self.record.alive = is_alive(self.record.start)
        return self.record

    def _take(self, lines: list[bytes]) -> None:
        marks: list[bytes] = []
        for line in lines:
            if not line:
                continue
            kind = "mark" if line.startswith(_MARK_PREFIX) else line_kind(line)
            if kind == "mark":
                marks.append(line)
            elif kind == "start":
                self._take_marks(marks)
                marks = []
                self._take_start(line)
            else:
                take_line(self.record, kind, line)
        self._take_marks(marks)
        del self.record.host[:-_HOST_SAMPLES]

    def _take_start(self, line: bytes) -> None:
        """A start: several runs may have written the same file, and the last one counts."""
        try:
            self._begin(_START.decode(line))
        except UNREADABLE:
            self.record.cut_lines += 1

    def _take_marks(self, lines: list[bytes]) -> None:
        marks, cut = decode_marks(b"\n".join(lines))
        self.record.cut_lines += cut
        for mark in marks:
            self.last = mark
            if mark.allocated is not None:
                if mark.name != "end" or mark.device not in self.latest:
                    self.latest[mark.device] = mark
                self.peaks[mark.device] = max(mark.allocated, self.peaks.get(mark.device, 0))
            key = (mark.name, mark.device)
            course = self._courses.get(key)
            if course is None:
                if len(self._courses) >= _OWN_NAMES:
                    key = (_REST, mark.device)
                course = self._courses.setdefault(key, Course())
            course.add(mark)


class RunTail:
    """Follows the newest run below some paths.

    Args:
        paths: each the directory of all runs, of a run, of a restart, or one rank's file. Several are the
            node-local directories of one run.
        look_again_s: seconds from one search for new files to the next.

    Attributes:
        tails: the ranks' files, by path; empty while there is no record yet.
        waiting: why there is none; None once there is.
    """

    def __init__(self, paths: Sequence[Path], look_again_s: float = 2.0) -> None:
        self.paths = list(paths)
        self._look_again_s = look_again_s
        self.tails: dict[Path, RankTail] = {}
        self.waiting: str | None = None
        self._look_at_s = 0.0
        self._starts: dict[Path, _StartScan] = {}

    def poll(self) -> bool:
        """Read what is new of every rank. Return whether anything was, or a file came or went."""
        begun = time.monotonic()
        changed = False
        if begun >= self._look_at_s or not self.tails:
            changed = self._look()
            self._look_at_s = time.monotonic() + self._look_again_s
        with collector_paused():
            for tail in self.tails.values():
                with suppress(OSError):  # deleted meanwhile, or its file system is away: the next look tells
                    while tail.read():
                        changed = True
        return changed

    def run(self) -> RunRecord:
        """The ranks of this run by number, their marks thinned. What had to be left out is in its notes.

        Raises:
            RecordError: nothing can be read yet.
        """
        records = [tail.as_record() for tail in self.tails.values()]
        readable = [record for record in records if is_readable(record)]
        if not readable:
            raise RecordError(self.waiting or "no line of the record can be read yet")
        kept, dropped = one_run(readable)
        kept.sort(key=lambda record: record.number)
        return RunRecord(ranks=kept, notes=dropped)

    def _look(self) -> bool:
        try:
            files = newest_records(self.paths, self._start_time)
            self.waiting = None
        except RecordError as error:
            files, self.waiting = [], str(error)
        if files == list(self.tails):
            return False
        self.tails = {file: self.tails.get(file) or RankTail(file) for file in files}
        return True

    def _start_time(self, path: Path) -> float | None:
        return self._starts.setdefault(path, _StartScan()).read(path)


class _StartScan:
    """When the run that a file records began, read on from where the last reading ended."""

    def __init__(self) -> None:
        self._offset = 0
        self._cut = b""
        self._time: float | None = None

    def read(self, path: Path) -> float | None:
        with open_record(path) as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._cut = (self._cut + data).split(b"\n")
        times = map(start_time_in, reversed(lines))
        self._time = next((time for time in times if time is not None), self._time)
        return self._time
