"""The JSON report: exactly the fields of `RunReport`, schema 1."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from memtriage.model import RunReport


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
    """Write a report as one line of JSON to a binary stream such as `sys.stdout.buffer`."""
    stream.write(msgspec.json.encode(report))
    stream.write(b"\n")
    stream.flush()


def _is_replaceable(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True
