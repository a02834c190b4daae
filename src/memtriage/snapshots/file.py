"""Load a PyTorch memory snapshot from an untrusted file without running code from it.

A snapshot is a pickle, and a pickle is a program. The restricted unpickler here knows no global name, so a
file can build plain containers, strings and numbers only; whatever else it asks for is refused.

Known limitations: a file made for that purpose can take all memory that is free, up to where it is refused,
or nest a dictionary's key so deeply that hashing it overflows the interpreter's stack, which ends the
process. It can run no code either way.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import os
import pickle
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, cast

import psutil
import zstandard

from memtriage.model.recording import SnapshotError
from memtriage.process.collector import collector_paused

MAGIC_SQLITE: Final = b"SQLite format 3\x00"
MAGIC_GZIP: Final = b"\x1f\x8b"
MAGIC_XZ: Final = b"\xfd7zXZ\x00"
MAGIC_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_PROTO: Final = 0x80
"""Opcode PROTO, which a pickle of protocol 2 or newer begins with; the protocol is the next byte."""
_PROTOCOLS: Final = range(2, 6)

EXPANSION_FREE: Final = 256 << 20
"""Bytes a compressed file may grow to before its ratio counts."""
EXPANSION_RATIO: Final = 400
"""Highest ratio of a compressed snapshot. Every event has a time of its own, so that real ones stay below 100
(measured on recordings of like steps: gzip 12, xz 20, zstd 19)."""
_GROWTH: Final = 64
"""Bytes of objects that a byte of a pickle can make: an empty list. Snapshots make five (measured)."""
_FIXED_GROWTH: Final = 256 << 20
_CHUNK: Final = 1 << 20
_DEVICES: Final = 1024


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[dict[str, Any]]:
    """Load the snapshot's dictionary, with only its outline checked. Collections pause until the block ends.

    Args:
        path: a snapshot, plain or compressed with gzip, xz or zstd (recognized by its first bytes).

    Yields:
        The dictionary; `segments` and `device_traces` are lists in it. A bare list of segments, as
        `torch.cuda.memory_snapshot()` returns it, is under `segments`.

    Raises:
        SnapshotError: when the file is anything else.
        OSError: when the file cannot be read.
    """
    # Millions of new containers would set off collections that find nothing, at a third of the time.
    with collector_paused():
        yield _outline(_load(path), path)


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        stream = _decompressed(file)
        try:
            if stream.peek(len(MAGIC_SQLITE)).startswith(MAGIC_SQLITE):
                return _from_sqlite(path)
            head = stream.peek(2)[:2]
            if not head and stream is not file:
                raise EOFError
            if len(head) < 2 or head[0] != _PROTO or head[1] not in _PROTOCOLS:
                looks = {b"": "the file is empty", b"PK": "it is a zip archive, perhaps a checkpoint"}
                reason = looks.get(head, f"it begins with {head!r}")
                raise SnapshotError(f"no pickle of protocol 2 to 5 ({reason})")
            size = os.fstat(file.fileno()).st_size
            with _memory_ceiling(size if stream is file else size * EXPANSION_RATIO):
                return _Restricted(stream).load()
        except SnapshotError as error:
            raise SnapshotError(f"{path}: not a memory snapshot: {error}") from None
        except (MemoryError, OverflowError):
            # The traceback holds what was built so far: drop it.
            raise SnapshotError(f"{path}: needs more memory than is free here, or is damaged") from None
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
                raise
            # A damaged pickle's opcodes raise nearly anything: bad text, unhashable keys, a stack underflow.
            reason = "it ends too early" if "truncated" in str(error) else str(error) or "it ends too early"
            raise SnapshotError(f"{path}: truncated or damaged: {reason}") from None


def _from_sqlite(path: Path) -> dict[str, Any]:
    """Read the tables that `_dump_snapshot_sqlite` writes: columns are keys of a pickle's entries."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as base:
            base.row_factory = sqlite3.Row
            kinds = dict(base.execute("SELECT name, type FROM sqlite_master").fetchall())
            for table in ("device_traces", "segments", "blocks"):
                if kinds.get(table) != "table":
                    raise SnapshotError(f"an SQLite file without a table `{table}`")
            traces: dict[int, list[dict[str, Any]]] = {}
            for event in _rows(base, "device_traces"):
                traces.setdefault(int(event.get("device") or 0), []).append(event)
            segments = {segment.get("id"): {**segment, "blocks": []} for segment in _rows(base, "segments")}
            for block in _rows(base, "blocks"):
                segments[block.get("segment_id")]["blocks"].append(block)
    except (sqlite3.Error, KeyError, ValueError) as error:
        raise SnapshotError(f"an SQLite file that makes no sense: {error!r}") from None
    devices = range(max(traces, default=-1) + 1)
    if len(devices) > _DEVICES:
        raise SnapshotError(f"an SQLite file with an event of device {devices[-1]:,}")
    return {
        "segments": list(segments.values()),
        "device_traces": [traces.get(device, []) for device in devices],
    }


def _rows(base: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    lists: dict[str, Any] = {}  # equal stacks are one object, as in a pickle
    for row in base.execute(f"SELECT * FROM {table} ORDER BY rowid"):
        entry = {name: row[name] for name in row.keys() if row[name] is not None}  # noqa: SIM118
        for one, other in (("addr", "address"), ("device_id", "device")):
            if one in entry or other in entry:
                entry[one] = entry[other] = entry.get(one, entry.get(other))
        for name in {"frames", "pool_id", "segment_pool_id"} & entry.keys():
            text = str(entry[name])
            if text not in lists:
                lists[text] = json.loads(text or "[]")
            entry[name] = lists[text]
        yield entry


class _Restricted(pickle.Unpickler):
    """The C unpickler without a single name to call."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise SnapshotError(f"it asks for {module}.{name}, and a snapshot names no code. Nothing was run")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise SnapshotError("it refers to objects outside the file. Nothing was run")


class _Limited(io.RawIOBase):
    """A decompressed stream that ends with an error where it grows beyond what a snapshot can."""

    def __init__(self, source: BinaryIO, compressed: int) -> None:
        self._source = source
        self._left = max(EXPANSION_FREE, compressed * EXPANSION_RATIO)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        chunk = self._source.read(len(buffer))
        self._left -= len(chunk)
        if self._left < 0:
            raise SnapshotError("it expands beyond any recording, a decompression bomb")
        buffer[: len(chunk)] = chunk
        return len(chunk)


def _decompressed(file: io.BufferedReader) -> io.BufferedReader:
    head = file.peek(len(MAGIC_XZ))
    for magic, decompress in _DECOMPRESSORS.items():
        if head.startswith(magic):
            size = os.fstat(file.fileno()).st_size
            return io.BufferedReader(_Limited(decompress(file), size), _CHUNK)
    return file


_DECOMPRESSORS: Final[Mapping[bytes, Callable[[BinaryIO], BinaryIO]]] = {
    MAGIC_GZIP: cast("Callable[[BinaryIO], BinaryIO]", gzip.open),
    MAGIC_XZ: cast("Callable[[BinaryIO], BinaryIO]", lzma.open),
    MAGIC_ZSTD: lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
}


@contextlib.contextmanager
def _memory_ceiling(size: int) -> Iterator[None]:
    """Let the process grow by what a pickle of so many bytes can honestly need and the machine has free.

    Five bytes of a pickle can ask for a memo of 64 GiB (opcode LONG_BINPUT). With a ceiling that is a
    MemoryError here, without it the end of some process on this machine.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    growth = min(psutil.virtual_memory().available, _FIXED_GROWTH + _GROWTH * size)
    ceiling = psutil.Process().memory_info().vms + growth
    if soft == resource.RLIM_INFINITY or ceiling < soft:
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _outline(raw: Any, path: Path) -> dict[str, Any]:
    if isinstance(raw, list):
        raw = {"segments": raw}
    if not isinstance(raw, dict):
        raise SnapshotError(f"{path}: not a memory snapshot: a pickled {type(raw).__name__}")
    for key in ("segments", "device_traces"):
        if not isinstance(raw.setdefault(key, []), list):
            raise SnapshotError(f"{path}: not a memory snapshot: `{key}` is a {type(raw[key]).__name__}")
    if not (raw["segments"] or raw["device_traces"] or raw.get("host_segments")):
        raise SnapshotError(f"{path}: not a memory snapshot: it has neither `segments` nor `device_traces`")
    return raw
