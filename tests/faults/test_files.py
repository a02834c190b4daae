"""Files from untrusted sources: damaged, endless or hostile ones end in one line, or in what can be read."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memtriage.cli.app import main
from memtriage.model.recording import SnapshotError
from memtriage.snapshots.file import loaded
from memtriage.store.locate import RecordError
from memtriage.store.reader import read_run

BLOCK = {"size": 512, "requested_size": 500, "address": 1 << 40, "state": "active_allocated", "frames": []}
SEGMENT = {"device": 0, "address": 1 << 40, "total_size": 2 << 20, "stream": 0, "blocks": [BLOCK] * 4}
TRACE = [{"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0, "time_us": 1}] * 4
SNAPSHOT = pickle.dumps({"segments": [SEGMENT] * 3, "device_traces": [TRACE]}, protocol=4)


def mutated(data: bytes, seed: int) -> bytes:
    """The same with a few bytes changed, left out or doubled."""
    dice = random.Random(seed)
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(changed))
        end = at + dice.randint(1, 8)
        match dice.randrange(4):
            case 0:
                changed[at] = dice.randrange(256)
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = changed[at:end]
            case _:
                changed[at:end] = dice.randbytes(end - at)
    return bytes(changed)


def test_two_thousand_damaged_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "damaged.pickle"
    refused = 0
    for seed in range(2000):
        path.write_bytes(mutated(SNAPSHOT, seed))
        try:
            with loaded(path) as raw:
                assert isinstance(raw["segments"], list)
        except SnapshotError as error:
            assert str(error).startswith(str(path))
            refused += 1
    assert 200 < refused < 2000


def test_a_snapshot_that_overflows_the_stack(tmp_path: Path) -> None:
    path = tmp_path / "deep.pickle"
    path.write_bytes(b"\x80\x02})" + b"\x85" * 3_000_000 + b"K\x01s.")
    done = subprocess.run(
        [sys.executable, "-m", "memtriage", "snapshot", str(path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert signal.SIGSEGV.name in done.stderr


@pytest.mark.parametrize(
    "value", [{"1": ("a",)}, {"1": "x"}, {"1": 3}, {"1": -1}, {"1": 10**400}, {1: 2.0}, {"1": {"2": []}}]
)
def test_a_snapshot_whose_settings_are_none(
    tmp_path: Path, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.pickle"
    settings = {"roundup_power2_divisions": value, ("a", "pair"): [1], "other": object}
    settings["other"] = [settings]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]], "allocator_settings": settings}))
    assert main(["snapshot", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "settings make no sense" in err


@pytest.mark.parametrize("repeated", ["segment", "blocks", "trace"])
def test_a_small_snapshot_that_repeats_itself(
    tmp_path: Path, repeated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """References of three bytes: 200,000 times 1000 blocks took 15.6 GB."""
    segments = [SEGMENT] * 2 if repeated == "segment" else [{**SEGMENT}, {**SEGMENT, "address": 2 << 40}]
    raw = {"segments": segments, "device_traces": [[]]}
    if repeated == "trace":
        raw = {"segments": [], "device_traces": [TRACE, TRACE]}
    path = tmp_path / "shared.pickle"
    path.write_bytes(pickle.dumps(raw))
    assert main(["snapshot", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "in several segments or devices" in err


START = {"t": "start", "schema": 1, "run_id": "x", "rank": None, "world_size": 1, "time": 1.0, "pid": 1}
MARK = (
    '{"t":"mark","name":"step","step":1,"microbatch":0,"rank":null,"time_s":%s,"device":"cpu",'
    '"allocated":1,"reserved":2}'
)
LINES = {
    "nested": [START, '{"t":"note","text":' + "[" * 1_000_000, MARK % 1],
    "late": [START, MARK % "1e308"],
    "ranks": [{**START, "rank": 0, "world_size": 2_000_000_000}, MARK % 1],
}


def record(folder: Path) -> Path:
    path = folder / "run" / "0" / "rank-00000.jsonl"
    path.parent.mkdir(parents=True)
    return path


def written(folder: Path, lines: list[object]) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    record(folder).write_text(text + "\n")
    return folder


HOST = {"t": "host", "time_s": 1.0, "step": 1, "rss": 5, "cgroup_usage": 7, "cgroup_limit": 9, "available": 3}
FINDING = {
    "t": "finding",
    "kind": "leak",
    "device": "cpu",
    "bytes": 1,
    "bytes_per_step": 2,
    "step": 3,
    "final": True,
}
LEDGER = {"t": "ledger", "device": "host", "total": 5, "source": "smaps", "step": 1, "parameters": 2}
END = {"t": "end", "verdict": "leak", "steps": 4, "exit_code": 1, "time_s": 2.0, "peak_rss": 5}
WHOLE: list[dict[str, object]] = [
    START,
    {**json.loads(MARK % 1), "host_rss": 4, "reserved": 5},
    {**json.loads(MARK % 2), "host_rss": 5, "step": 2},
    HOST,
    {**FINDING, "final": True, "projection": {"device": "cpu", "limit": 9, "step": 5}},
    {**LEDGER, "rows": [{"row": "libraries", "bytes": 5}]},
    {**END, "device_limits": {"cpu": 9}, "judged": {"cpu": {"scale": "step", "points": 4}}},
]


@pytest.mark.parametrize("number", [10**400, 1 << 63, (1 << 63) - 1, -(1 << 63)])
@pytest.mark.parametrize("html", [False, True])
def test_any_number_of_a_record_may_be_huge(
    tmp_path: Path, number: int, html: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for at, line in enumerate(WHOLE):
        for name in [name for name, value in line.items() if type(value) is int]:
            folder = tmp_path / f"{at}-{name}"
            written(folder, [*WHOLE[:at], {**line, name: number}, *WHOLE[at + 1 :]])
            page = ["--html", str(folder / "page.html")] if html else []
            assert main(["report", str(folder), *page]) == 0, (line["t"], name)
            assert capsys.readouterr().err == (f"wrote {page[1]}\n" if page else "")


@pytest.mark.parametrize("name", LINES)
def test_a_record_out_of_all_bounds(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(written(tmp_path, LINES[name]))]) == 0
    assert "1 cut or garbled line" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_record_that_never_ends(tmp_path: Path, kind: str) -> None:
    path = record(tmp_path)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(RecordError, match="not a regular file"):
        read_run([tmp_path])


def test_a_thousand_damaged_records(tmp_path: Path) -> None:
    whole = written(tmp_path, [START, *(MARK % number for number in range(20))]) / "run/0/rank-00000.jsonl"
    data = whole.read_bytes()
    read = 0
    for seed in range(1000):
        whole.write_bytes(mutated(data, seed))
        try:
            (rank,) = read_run([tmp_path]).ranks
        except RecordError:
            continue
        read += 1
        assert len(rank.marks) <= 22
    assert read > 900


@pytest.mark.parametrize("command", ["snapshot", "report", "explain"])
def test_a_file_name_moves_no_cursor(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "\033]0;title\007x.pickle")]) == 2
    err = capsys.readouterr().err
    assert "\033" not in err and "\\x1b]0;title" in err
