"""Logs of any length, encoding and line ends give the messages that are in them, on the right lines."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages import log_file
from memtriage.messages.log_file import LogPolicy, LogReading, expandable_segments_on, read_log, read_text

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of "
    "79.18 GiB of which 1.08 GiB is free. Of the allocated memory 75.31 GiB is allocated by PyTorch, and "
    "1.83 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
KILLED = "Out of memory: Killed process 7 (python) total-vm:100kB, anon-rss:80kB, file-rss:0kB, shmem-rss:0kB"
SIZES = {
    "requested": 2104533975,
    "total": 85018877624,
    "free": 1159641170,
    "allocated": 80863496765,
    "reserved_unallocated": 1964947538,
}


def other_lines(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [
        f"2024-11-20 12:33:{i % 60:02d} INFO [rank{i % 8}]: step {i} loss={rng.random():.4f} allocated "
        "12.3 GiB, saving a skill, exit code 0"
        for i in range(count)
    ]


def seen(reading: LogReading) -> list[tuple[int, str, int | None]]:
    return [(each.line, each.message.family, each.rank) for each in reading.messages]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a log of a few hundred KiB is read in pieces."""
    pieces = LogPolicy(whole=1024, chunk=16 * 1024, margin=6 * 1024, before=2 * 1024, after=2 * 1024)
    monkeypatch.setattr(log_file, "POLICY", pieces)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("at", [0, 1, 100, 149, 150, 151, 297, 1500, 1999])
def test_a_message_is_found_wherever_the_pieces_end(at: int) -> None:
    lines = other_lines(2000)
    lines[at] = f"[rank3]: {FULL}"
    reading = read_text("\n".join(lines) + "\n")
    assert seen(reading) == [(at + 1, "cuda-v2", 3)]
    assert dict(reading.messages[0].message.fields) == SIZES
    assert reading.lines == 2000


@pytest.mark.usefixtures("small_chunks")
def test_several_messages_keep_their_order_and_are_found_once() -> None:
    lines = other_lines(3000)
    for at, text in {
        700: f"[rank5]: {FULL}",
        704: f"[rank2]: {FULL}",
        1800: KILLED,
        2999: "exitcode: -9",
    }.items():
        lines[at] = text
    reading = read_text("\n".join(lines))
    assert seen(reading) == [
        (701, "cuda-v2", 5),
        (705, "cuda-v2", 2),
        (1801, "kernel-oom", None),
        (3000, "launcher", None),
    ]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("width", [41, 60, 79])
def test_a_wrapped_message_in_a_long_log(width: int) -> None:
    wrapped = [FULL[i : i + width] for i in range(0, len(FULL), width)]
    lines = [line.replace("[rank", "(worker ") for line in other_lines(1000)]
    reading = read_text("\n".join([*lines[:600], *wrapped, *lines[600:]]))
    assert [(each.line, dict(each.message.fields)) for each in reading.messages] == [(601, SIZES)]


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 60_000), st.integers(1, 9999))
def test_pieces_do_not_matter(offset: int, chunk: int) -> None:
    text = ("x" * 83 + "\n") * 800
    text = f"{text[:offset]}\n{FULL}\n{text[offset:]}"

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or -1, chunk))

    reading = read_log(Slow(text.encode()))
    assert [dict(each.message.fields) for each in reading.messages] == [SIZES]
    assert reading.messages[0].line == text[: text.index(FULL)].count("\n") + 1
    assert reading.lines == text.count("\n")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_logs_of_powershell(encoding: str) -> None:
    lines = other_lines(500)
    lines[300] = FULL
    reading = read_log(io.BytesIO("\r\n".join(lines).encode(encoding)))
    assert seen(reading) == [(301, "cuda-v2", None)]


def test_a_short_utf_16_text() -> None:
    assert seen(read_log(io.BytesIO(FULL.encode("utf-16")))) == [(1, "cuda-v2", None)]


@pytest.mark.usefixtures("small_chunks")
def test_a_progress_bar_is_one_line_of_many_parts() -> None:
    bar = "\r".join(f"{i}%|####| {i}/100 [00:01<00:01, 12.3it/s]" for i in range(3000))
    reading = read_log(io.BytesIO(f"start\n{bar}\r{FULL}\r{bar}\nend\n".encode()))
    assert seen(reading) == [(2, "cuda-v2", None)]
    assert reading.lines == 3


@pytest.mark.usefixtures("small_chunks")
def test_of_many_alike_the_first_are_read_and_the_rest_counted() -> None:
    lines = [f"[rank{i % 4}]: {FULL.replace('GPU 0', f'GPU {i % 7}')}" for i in range(2000)]
    reading = read_text("\n".join(lines))
    assert reading.messages[0].line == 1
    assert {each.rank for each in reading.messages} == {0, 1, 2, 3}
    assert len(reading.messages) < 1000 < reading.unread
    assert reading.unread == len(lines) - 256


@pytest.mark.usefixtures("small_chunks")
def test_any_bytes_are_read() -> None:
    noise = random.Random(3).randbytes(200_000)
    reading = read_log(io.BytesIO(noise + b"\n" + FULL.encode() + b"\n" + noise))
    assert "cuda-v2" in [each.message.family for each in reading.messages]


def test_nothing() -> None:
    assert read_text("") == LogReading()


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", True),
        ("'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:128,expandable_segments:True'", True),
        ('os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"', True),
        (FULL, False),
        (FULL.replace("try setting ", "try setting\n"), False),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False", False),
    ],
)
def test_whether_expandable_segments_are_on(text: str, on: bool) -> None:
    assert expandable_segments_on(text.encode()) == on
    assert read_text(text).expandable == on


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (FULL, "cuda-v2"),
        (KILLED, "kernel-oom"),
        ("Killed", "launcher"),
        ("MemoryError", "python-alloc"),
        ("OUT_OF_MEMORY", "slurm"),
        ("CUDA driver error: invalid argument", "cuda-driver"),
        ("DataLoader worker (pid(s) 12, 34) exited unexpectedly", "dataloader-killed"),
        ("out of memory: CUDA", "mention"),
    ],
)
def test_a_log_may_begin_with_its_message(text: str, family: str) -> None:
    for before in ("", "\n"):
        assert [each.message.family for each in read_text(before + text).messages] == [family]
