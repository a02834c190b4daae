"""Finding records on disk: which files below the paths that a user gives belong to which run."""

from __future__ import annotations

import errno
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from memtriage.model.bounds import Seconds
from memtriage.process.stdlib import os
from memtriage.store.layout import RECORD_GLOB
from memtriage.store.records import UNREADABLE

_LEVELS: Final = (RECORD_GLOB, f"*/{RECORD_GLOB}", f"*/*/{RECORD_GLOB}")
"""The directory of a restart, of a run, of all runs."""


class RecordError(Exception):
    """A path holds no record that can be read. The text is one line for the user."""


def newest_records(paths: Sequence[Path]) -> list[Path]:
    """Return the record files of the newest run, in its newest restart.

    Of several paths that share a run, the newest run they share is taken; otherwise each path's newest.

    Args:
        paths: each the directory of all runs, of a run, of a restart, or one rank's file.

    Raises:
        RecordError: a path does not exist or holds no record.
    """
    by_path = [_attempts(path) for path in paths]
    shared = (
        set.intersection(*({attempt.key for attempt in attempts} for attempts in by_path))
        if by_path
        else set()
    )
    if shared:
        common = [attempt for attempts in by_path for attempt in attempts if attempt.key in shared]
        newest = _newest(common).key
        by_path = [[attempt for attempt in attempts if attempt.key == newest] for attempts in by_path]
    chosen = [_newest(attempts) for attempts in by_path]
    return list(dict.fromkeys(file for attempt in chosen for file in attempt.files))


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One restart of one run: the directory that its ranks write to."""

    run: str
    restart: str
    files: list[Path]

    @property
    def key(self) -> tuple[str, str]:
        return (self.run, self.restart)


def open_record(path: Path) -> BinaryIO:
    """Open a record for reading.

    Raises:
        OSError: it cannot be read, or is a pipe or a device, whose reading need not end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(descriptor, "rb", buffering=0)


def _attempts(path: Path) -> list[_Attempt]:
    try:
        if path.is_file():
            return _by_directory([path.resolve()])
        if not path.is_dir():
            raise RecordError(f"{path}: no such file or directory")
        root = path.resolve()
        for pattern in _LEVELS:
            if files := sorted(root.glob(pattern)):
                return _by_directory(files)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    raise RecordError(f"{path}: no memtriage record in it ({RECORD_GLOB}, at most two directories down)")


def _by_directory(files: list[Path]) -> list[_Attempt]:
    directories: dict[Path, list[Path]] = {}
    for file in files:
        directories.setdefault(file.parent, []).append(file)
    return [_Attempt(folder.parent.name, folder.name, ranks) for folder, ranks in directories.items()]


def _newest(attempts: list[_Attempt]) -> _Attempt:
    if len(attempts) == 1:
        return attempts[0]
    return max(attempts, key=_started)


def _started(attempt: _Attempt) -> tuple[float, str]:
    """Return when the attempt's first rank last started; the file's age where its record does not say."""
    file = attempt.files[0]
    try:
        time = _last_start_time(file)
        return (file.stat().st_mtime if time is None else time, attempt.restart)
    except OSError:  # unreadable or deleted meanwhile: the oldest, and reported if it is the only one
        return (0.0, attempt.restart)


class _StartTime(msgspec.Struct, tag_field="t", tag="start"):
    time: Seconds | None = None


def _last_start_time(path: Path) -> float | None:
    """Return when the last run in a file began (Unix time); None if the file does not say."""
    with open_record(path) as file:
        for line in reversed(file.read().split(b"\n")):
            if b'"start"' in line:
                with suppress(*UNREADABLE):  # a cut line, or the word in another line
                    if (time := msgspec.json.decode(line, type=_StartTime).time) is not None:
                        return time
    return None
