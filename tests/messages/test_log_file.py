"""Logs of any length, encoding and line ends give the messages that are in them, on the right lines."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages import log_file
from memtriage.messages.log_file import LogReading, expandable_segments_on, read_log, read_text

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
    read_in_pieces(monkeypatch, _WHOLE=1024, _CHUNK=16 * 1024, _MARGIN=6 * 1024, _BEFORE=2048, _AFTER=2048)


def read_in_pieces(patch: pytest.MonkeyPatch, **sizes: int) -> None:
    for name, size in sizes.items():
        patch.setattr(log_file, name, size)


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
@pytest.mark.parametrize("filler", ["x", "loss ", "memory of a skill, exit code 0; "])
@pytest.mark.parametrize("at", [0, 2_000, 40_000, 199_000])
def test_a_message_anywhere_in_one_long_line(filler: str, at: int) -> None:
    line = (filler * 200_000)[:200_000]
    reading = read_text(f"{line[:at]} {FULL} {line[at:]}")
    (message,) = [each for each in reading.messages if each.message.ran_out]
    assert (message.line, dict(message.message.fields), reading.lines) == (1, SIZES, 1)
    assert FULL[:300] in message.excerpt


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


WITH_MEMORY = "INFO: peak memory 12.3 GiB"
SERVES = 'File "/opt/vllm/engine/llm_engine.py", line 12, in step'
BUILDS = "Building wheel for flash-attn (setup.py): started"
EXPANDABLE = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
CAUGHT = (
    "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600000 milliseconds"
)


PARTS = st.sampled_from(
    [
        [FULL],
        [KILLED],
        [WITH_MEMORY],
        [EXPANDABLE],
        [FULL, CAUGHT],
        [SERVES, FULL],
        [BUILDS, KILLED],
        ["exitcode: -9", FULL],
    ]
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 90), PARTS), max_size=4),
    st.integers(0, 90),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_a_log_read_in_pieces_has_what_it_has_as_a_whole(
    parts: list[tuple[int, list[str]]], rest: int, ending: str, at_line_end: bool
) -> None:
    others = [f"[rank9]: step {number}, saving a skill, exit code 0" for number in range(90)]
    lines = []
    for rank, (before, part) in enumerate(parts):
        lines += [*others[:before], *(f"[rank{rank}]: {line}" for line in part)]
    text = ending.join(lines + others[:rest]) + ending * at_line_end
    with pytest.MonkeyPatch.context() as patch:
        read_in_pieces(patch, _WHOLE=0, _CHUNK=1024, _MARGIN=3 * 1024, _BEFORE=1024, _AFTER=1024)
        reading = read_text(text)
    whole = read_text(text)
    assert seen(reading) == seen(whole)
    for found in (reading, whole):
        found.messages.clear()  # in pieces, only the nearest lines before a message say where it is from
    if "memory" not in text:  # of a long log, only lines with the word itself speak
        whole.speaks = None
    assert reading == whole


@pytest.mark.usefixtures("small_chunks")
def test_what_follows_from_a_failure_is_looked_for_after_it() -> None:
    lines = other_lines(1200)
    lines[10] = lines[900] = CAUGHT
    assert seen(read_text("\n".join(lines))) == []
    lines[300] = FULL
    assert [line for line, _, _ in seen(read_text("\n".join(lines)))] == [301, 901]


@pytest.mark.usefixtures("small_chunks")
def test_the_first_line_that_speaks_of_memory_is_kept() -> None:
    assert read_text(f"start\n{WITH_MEMORY}\nmore memory\n").speaks == (2, "peak memory 12.3 GiB")
    assert read_text("\n".join([WITH_MEMORY, *other_lines(1000)])).speaks == (1, "peak memory 12.3 GiB")
    assert read_text("start\n").speaks is None


@pytest.mark.parametrize(
    ("line", "traits"),
    [
        (SERVES, {"engine"}),
        (SERVES.replace("vllm", "villa"), set()),
        ("launch_server --model-path m --mem-fraction-static 0.8", {"engine"}),
        ("launch_server --model-path m --fraction-static 0.8", set()),
        (BUILDS, {"builds"}),
    ],
)
def test_what_a_program_is_by_its_files_and_options(line: str, traits: set[str]) -> None:
    assert read_text(line).traits == traits


@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_that_gives_a_part_of_a_character_has_not_ended(size: int) -> None:
    class Slow(io.BytesIO):
        def read(self, wanted: int | None = -1, /) -> bytes:
            return super().read(size if self.tell() > 2 * len(WITH_MEMORY) else 2 * len(WITH_MEMORY))

    text = f"{WITH_MEMORY}\n{FULL}\n"
    assert seen(read_log(Slow(text.encode("utf-16-le")))) == [(2, "cuda-v2", None)]


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


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", True),
        ("'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:128,expandable_segments:True'", True),
        ('os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"', True),
        (FULL, False),
        (FULL.replace("try setting ", "try setting\n"), False),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False", False),
        # An error's advice, told by the words before it or by those after it, some characters away.
        ("try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.", False),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation", False),
        (f"{FULL}\nPYTORCH_HIP_ALLOC_CONF=expandable_segments:True", True),
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
