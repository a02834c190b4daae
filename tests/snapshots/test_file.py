"""Reading files from untrusted sources."""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import lzma
import os
import pickle
import resource
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.model.recording import SnapshotError
from memtriage.snapshots.file import EXPANSION_FREE, loaded
from memtriage.snapshots.read import load_snapshot
from support.raw_snapshot import Program, save, snapshot_of, user

SNAPSHOT = {"segments": [{"address": 4096, "blocks": []}], "device_traces": [[]], "external_annotations": []}


def read(data: bytes, folder: Path) -> dict[str, Any]:
    path = folder / "snapshot.pickle"
    path.write_bytes(data)
    with loaded(path) as raw:
        return raw


class Touches:
    """Pickles as a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, zstandard.compress])
def test_every_protocol_and_compression_is_read(
    tmp_path: Path, protocol: int, compress: Callable[[bytes], bytes]
) -> None:
    assert read(compress(pickle.dumps(SNAPSHOT, protocol)), tmp_path) == SNAPSHOT


def test_zstd_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    data = pickle.dumps(SNAPSHOT)
    assert read(zstandard.compress(data[:9]) + zstandard.compress(data[9:]), tmp_path) == SNAPSHOT


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_with_code_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    touched = tmp_path / "touched"
    data = pickle.dumps({"segments": [], "device_traces": [[Touches(touched)]]}, protocol)
    with pytest.raises(SnapshotError, match="not a memory snapshot"):
        read(data, tmp_path)
    assert not touched.exists()
    pickle.loads(data)
    assert touched.exists()  # the file was a real threat


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cposix\nsystem\n(S'id'\ntR.",
        b"(S'id'\niposix\nsystem\n.",
        b"\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        b"cbuiltins\neval\n.",
        b"ccollections\nOrderedDict\n.",
        b"Pabc\n.",
        b"K\x01Q.",
        b"\x82\x01.",
        b"}}b.",
        b"K\x01)R.",
        b"}}\x81.",
    ],
)
def test_no_way_to_name_or_to_call_is_open(tmp_path: Path, opcodes: bytes) -> None:
    with pytest.raises(SnapshotError):
        read(b"\x80\x04" + opcodes, tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\x80", "begins with"),
        (b"PK\x03\x04....", "zip archive"),
        (b'{"segments": []}', "protocol 2 to 5"),
        (pickle.dumps(7), "a pickled int"),
        (pickle.dumps({}), "neither"),
        (pickle.dumps({"segments": 3}), "`segments` is a int"),
        (pickle.dumps({"segments": [1], "device_traces": {}}), "`device_traces` is a dict"),
        (b"\x80\x04]]s.", "damaged"),
        (b"\x80\x04}]K\x01s.", "damaged"),
        (gzip.compress(pickle.dumps(SNAPSHOT))[:-9], "damaged"),
        (lzma.compress(pickle.dumps(SNAPSHOT))[:-9], "damaged"),
        (zstandard.compress(pickle.dumps(SNAPSHOT))[:-4], "damaged"),
        (b"\x1f\x8b nothing of the kind", "damaged"),
        (b"\x28\xb5\x2f\xfd\xff\xff\xff\xff", "damaged"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60), "memory"),
        (b"\x80\x04}r\xff\xff\xff\xff.", "memory|damaged"),
    ],
)
def test_non_snapshot_is_refused_with_name_and_reason(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(SnapshotError, match=rf"snapshot\.pickle: .*({reason})"):
        read(data, tmp_path)


@given(cut=st.integers(0, 60))
@settings(max_examples=61)
def test_a_file_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    data = pickle.dumps(SNAPSHOT)
    with pytest.raises(SnapshotError):
        read(data[: min(cut, len(data) - 1)], tmp_path_factory.getbasetemp())


@given(data=st.binary(max_size=80))
def test_noise_is_refused_or_read_and_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    try:
        read(b"\x80\x04" + data, tmp_path_factory.getbasetemp())
    except SnapshotError:
        pass


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    size = EXPANSION_FREE + (64 << 20)
    head = b"\x80\x04}\x8c\x08segmentsB" + struct.pack("<I", size)
    packer = zstandard.ZstdCompressor().compressobj()
    data = packer.compress(head) + b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20))
    with pytest.raises(SnapshotError, match="bomb"):
        read(data + packer.flush() + b"", tmp_path)


def test_a_file_may_take_what_it_honestly_needs_and_the_limit_is_lifted_after_it(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    snapshot = {**SNAPSHOT, "note": "x" * (128 << 20)}
    path = tmp_path / "large.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    with loaded(path) as raw:
        assert raw == snapshot
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("room", [None, 1 << 20, 1 << 50])
def test_the_limit_is_lowered_while_a_file_is_read_and_never_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    now = psutil.Process().memory_info().vms
    own = resource.RLIM_INFINITY if room is None else now + room
    asked: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (own, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits[0]))
    read(pickle.dumps(SNAPSHOT), tmp_path)
    *lowered, restored = asked
    assert restored == own
    assert len(lowered) == (0 if room == 1 << 20 else 1)
    assert all(now < limit < now + (1 << 50) for limit in lowered)


def test_a_lower_limit_of_the_process_stays(tmp_path: Path) -> None:
    lower = psutil.Process().memory_info().vms + (200 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (lower, before[1]))
    try:
        assert read(pickle.dumps(SNAPSHOT), tmp_path) == SNAPSHOT
        assert resource.getrlimit(resource.RLIMIT_AS) == (lower, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("data", [pickle.dumps(SNAPSHOT), b"nothing"])
def test_the_collector_is_as_it_was(tmp_path: Path, data: bytes) -> None:
    assert gc.isenabled()
    try:
        read(data, tmp_path)
    except SnapshotError:
        pass
    assert gc.isenabled()


def test_a_bare_list_of_segments_is_a_snapshot(tmp_path: Path) -> None:
    assert read(pickle.dumps([{"address": 1}]), tmp_path) == {
        "segments": [{"address": 1}],
        "device_traces": [],
    }


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), loaded(tmp_path / "none"):
        pass


# A dump into SQLite


def sqlite_dump(path: Path, raw: dict[str, Any]) -> Path:
    """The tables of `torch.cuda.memory._dump_snapshot_sqlite`."""
    segments = [{**one, "id": number} for number, one in enumerate(raw["segments"])]
    tables = {
        "device_traces": [
            {**event, "device": device}
            for device, trace in enumerate(raw["device_traces"])
            for event in trace
        ],
        "segments": [{name: each for name, each in one.items() if name != "blocks"} for one in segments],
        "blocks": [{**block, "segment_id": one["id"]} for one in segments for block in one["blocks"]],
    }
    with contextlib.closing(sqlite3.connect(path)) as base:
        for table, rows in tables.items():
            names = list(rows[0])
            base.execute(f"CREATE TABLE {table} ({', '.join(names)})")
            texts = [
                [json.dumps(each) if isinstance(each, list | tuple) else each for each in row.values()]
                for row in rows
            ]
            base.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", texts)
        base.commit()
    return path


def test_a_dump_into_sqlite_reads_as_its_pickle(tmp_path: Path) -> None:
    program = Program()
    kept = program.alloc(3 << 20, user(3))
    program.free(program.alloc(5 << 20, user(4)))
    raw = snapshot_of(program)
    dumped, pickled = (
        load_snapshot(path).devices[0]
        for path in (sqlite_dump(tmp_path / "one.db", raw), save(raw, tmp_path / "one.pickle"))
    )
    assert dumped.end.allocated == kept.size
    assert (dumped.end, dumped.peak, dumped.sites) == (pickled.end, pickled.peak, pickled.sites)


def test_another_sqlite_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE runs (name)")
        base.execute("CREATE VIEW device_traces AS SELECT * FROM runs")
        base.commit()
    with pytest.raises(SnapshotError, match="an SQLite file without a table `device_traces`"):
        load_snapshot(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SnapshotError, match="an SQLite file that makes no sense"):
        load_snapshot(path)
