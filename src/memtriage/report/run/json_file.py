"""The JSON report: exactly the fields of `RunReport`, schema 1."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from memtriage.model.report import RunReport
from memtriage.process.json_text import encode

_NO_MARKS: Final = b'"marks":[]'
_MARKS_A_PIECE: Final = 10_000


def write(report: RunReport, path: Path) -> None:
    """Write a report so that a reader sees the whole of it or the file that was there before.

    Missing parent directories are made. What is no ordinary file (a link, a pipe, `/dev/stdout`) is
    written through instead of replaced.

    Raises:
        OSError: the directory or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not _is_replaceable(path):
        with path.open("wb") as file:
            write_stream(report, file)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            write_stream(report, file)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_stream(report: RunReport, stream: BinaryIO) -> None:
    """Write a report as one line of JSON to a binary stream such as `sys.stdout.buffer`.

    Marks go out in pieces: those of a thousand ranks would take hundreds of megabytes at once.
    """
    whole = encode(msgspec.structs.replace(report, marks=[]))
    before, separator, after = whole.partition(_NO_MARKS)  # in a string its quotes would be escaped
    assert separator
    stream.write(before + _NO_MARKS[:-1])
    for first in range(0, len(report.marks), _MARKS_A_PIECE):
        piece = msgspec.json.encode(report.marks[first : first + _MARKS_A_PIECE])
        stream.write(piece[1:-1] if first == 0 else b"," + piece[1:-1])
    stream.write(_NO_MARKS[-1:] + after + b"\n")
    stream.flush()


def _is_replaceable(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True
