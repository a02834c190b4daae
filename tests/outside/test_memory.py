"""Memory of another process: what is mapped, what is not, and a process that ends."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memtriage.outside import memory as outside_memory
from memtriage.outside.memory import (
    CHUNK,
    SLOT,
    ForbiddenError,
    GoneError,
    Mapping,
    ProcessMemory,
    RemoteMemory,
    parse_maps,
)
from support.remote_memory import SIZE, START, FakeMemory, hostile_heap


def test_mappings_are_read_from_the_kernels_text() -> None:
    text = (
        "7f00000000-7f00002000 rw-p 00000000 00:00 0 \n"
        "5500000000-5500001000 r--p 00000000 08:01 12 /a file with spaces\n"
        "7f00004000-7f00005000 rw-s 00000000 00:06 9 /dev/nvidia0\n"
    )
    found = parse_maps(text)
    assert [mapping.path for mapping in found] == ["/a file with spaces", "", "/dev/nvidia0"]
    assert [mapping.readable for mapping in found] == [True, True, False]
    assert [mapping.shared for mapping in found] == [False, False, True]


@given(st.integers(0, 2 * CHUNK - 1), st.integers(0, 300))
def test_bytes_at_any_place(at: int, count: int) -> None:
    data = random.Random(1).randbytes(2 * CHUNK)
    memory = FakeMemory(data)
    expected = data[at : at + count].ljust(count, b"\0")
    assert memory.text_bytes(START + at, count) == expected
    aligned = at & ~7
    assert memory.word(START + aligned) == int.from_bytes(data[aligned : aligned + 8], "little")
    assert memory.byte(START + at) == data[at]


@pytest.mark.parametrize("address", [0, 8, -8, START - 8, START + 2 * CHUNK, 1 << 60, (1 << 64) - 8])
def test_what_is_not_mapped_is_zeros(address: int) -> None:
    memory = FakeMemory(b"\xff" * 2 * CHUNK)
    assert memory.word(address) == 0
    assert not any(memory.words(address, 1))


def test_this_process_reads_itself() -> None:
    value = ctypes.create_string_buffer(b"the quick brown fox")
    memory = ProcessMemory(os.getpid())
    assert memory.text_bytes(ctypes.addressof(value), 19) == b"the quick brown fox"


def test_a_process_that_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        memory = ProcessMemory(child.pid)
        readable = next(mapping for mapping in memory.mappings if mapping.readable)
        child.kill()
        child.wait()
        with pytest.raises(GoneError, match=f"process {child.pid} ended"):
            memory.word(readable.start)
    with pytest.raises(GoneError):
        ProcessMemory(child.pid)


def test_memory_that_another_process_opened_is_read_until_its_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import ctypes; b = ctypes.create_string_buffer(b'the quick'); print(ctypes.addressof(b), flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", f"{code}; input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        address = int(child.stdout.readline())
        opened = os.open(f"/proc/{child.pid}/mem", os.O_RDONLY)
        memory, later = ProcessMemory(child.pid, opened), ProcessMemory(child.pid, opened)
        monkeypatch.delattr(memory, "_readv")
        assert memory.text_bytes(address, 9) == b"the quick"
        child.communicate(b"\n")
    with pytest.raises(GoneError, match=f"process {child.pid} ended"):
        later.word(address & ~7)
    os.close(opened)


def test_a_process_that_must_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ProcessMemory(os.getpid())

    def refused(*_: object) -> int:
        ctypes.set_errno(1)
        return -1

    monkeypatch.setattr(memory, "_readv", refused)
    readable = next(mapping for mapping in memory.mappings if mapping.readable)
    with pytest.raises(ForbiddenError):
        memory.word(readable.start)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([11, 12, 13, 14]))
def test_hostile_structures_neither_crash_nor_hang(seed: int, pointers: bool, minor: int) -> None:
    """Random bytes, or random pointers into themselves, where objects should be."""
    chance, heap = hostile_heap(seed, pointers, minor)
    for _ in range(20):
        address = START + 8 * chance.randrange(SIZE >> 3)
        heap.type_of(address)
        heap.referents(address)
        heap.text(address)
        heap.number(address)
        heap.frame(address)
        for read in (heap.list_items, heap.tuple_items, heap.set_items, heap.deque_items, heap.dict_items):
            assert len(read(address)) <= 8_000_000


def test_the_copy_has_room_for_what_is_mapped() -> None:
    memory = FakeMemory(bytes(2 * CHUNK))
    assert 2 * CHUNK <= memory.data.nbytes < 12 * CHUNK


class ChangingMemory(FakeMemory):
    """Has other bytes at each copy."""

    def _copy(self, parts: Sequence[tuple[int, int, int]]) -> int:
        self._data = bytes(byte + 1 for byte in self._data)
        return super()._copy(parts)


def test_only_a_range_is_copied_again() -> None:
    memory = ChangingMemory(bytes(2 * CHUNK))
    memory.read_ahead([START // CHUNK, START // CHUNK + 1])
    assert (memory.byte(START), memory.byte(START + CHUNK)) == (1, 1)
    memory.copy_again(np.array([START]), np.array([CHUNK]))
    assert (memory.byte(START), memory.byte(START + CHUNK)) == (2, 1)
    memory.copy_again(np.array([START]), np.array([CHUNK + 1]))
    assert memory.byte(START + CHUNK) > 2
    before = memory.byte(START)
    memory.copy_again(np.array([START, 0]), np.array([0, CHUNK]))
    assert memory.byte(START) == before


def test_what_is_put_into_a_copy_stays_in_it() -> None:
    memory = FakeMemory(bytes(2 * CHUNK))
    memory.put(
        np.array([START + 8, START + 2 * CHUNK]), np.array([[5, 6], [7, 8]])
    )  # nothing is at the second
    memory.copy_again(np.array([START]), np.array([64]))
    assert [memory.word(START + 8 * at) for at in range(4)] == [0, 5, 6, 0]
    assert memory.data[:SLOT].max() == 0


def test_a_copy_is_completed_with_another_one() -> None:
    earlier, later = ChangingMemory(bytes(2 * CHUNK)), FakeMemory(bytes([9]) * (2 * CHUNK))
    first, second = START // CHUNK, START // CHUNK + 1
    earlier.read_ahead([first, second])
    later.read_ahead([first])
    assert not later.agrees(earlier, first)
    later.adopt(earlier)
    assert (later.byte(START), later.byte(START + CHUNK)) == (9, 1)
    assert later.agrees(earlier, second)


PAGE = 4096
FAR = START + (5 << 30)  # in another block of 1 GiB
SPARSE = {
    START: 2 * PAGE,
    START + 3 * PAGE: PAGE,
    START + CHUNK - PAGE: 3 * PAGE,  # over the end of a chunk
    START + 3 * CHUNK: CHUNK + PAGE,
    FAR: PAGE,
    FAR + (2 << 30): 2 * CHUNK,
}
"""Mappings with gaps: bytes of each, by its address."""


class SparseMemory(RemoteMemory):
    """Several mappings, each full of bytes that say where they are."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__([Mapping(start, start + size, True, False, "") for start, size in sizes.items()])
        self.parts = {start: random.Random(start).randbytes(size) for start, size in sizes.items()}
        self.copied: list[tuple[int, int]] = []

    def true_bytes(self, address: int, count: int) -> bytes:
        """What the process has; zeros where nothing is mapped."""
        wanted = bytearray(count)
        for start, data in self.parts.items():
            first, last = max(address, start), min(address + count, start + len(data))
            if first < last:
                wanted[first - address : last - address] = data[first - start : last - start]
        return bytes(wanted)

    def _copy(self, parts: Sequence[tuple[int, int, int]]) -> int:
        self.copied += [(address, size) for address, size, _ in parts]
        for address, size, at in parts:
            self.raw[at : at + size] = self.true_bytes(address, size)
        return sum(size for _, size, _ in parts)


EDGES = [at for start, size in SPARSE.items() for at in (start, start + size)]
NEAR_AN_EDGE = st.builds(lambda edge, by: edge + by, st.sampled_from(EDGES), st.integers(-PAGE, PAGE))


@given(NEAR_AN_EDGE, st.integers(-1, 3 * CHUNK >> 3))
def test_words_are_those_of_the_process_across_gaps_and_chunks(address: int, count: int) -> None:
    memory = SparseMemory(SPARSE)
    aligned = address & ~7
    assume(memory.place(aligned))  # nothing begins where nothing is mapped
    raw = memory.true_bytes(aligned, 8 * max(0, count))
    expected = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    assert memory.words(aligned, count) == expected
    assert memory.text_bytes(address, count) == memory.true_bytes(address, max(0, count))
    word = int.from_bytes(memory.true_bytes(aligned, 8), "little")
    assert memory.word(aligned) == word
    assert memory.signed(aligned) == int.from_bytes(memory.true_bytes(aligned, 8), "little", signed=True)
    assert memory.byte(address) == memory.true_bytes(address, 1)[0]
    half = address & ~3
    assert memory.half(half) == int.from_bytes(memory.true_bytes(half, 4), "little")


@given(st.lists(NEAR_AN_EDGE, max_size=30), st.integers(1, 5))
def test_places_and_live_words_of_many_addresses(near: list[int], count: int) -> None:
    memory = SparseMemory(SPARSE)
    addresses = [address & ~7 for address in [*near, 0, -8, 1 << 48, (1 << 48) - 8]]
    places = memory.places(np.array(addresses))
    assert places.tolist() == [memory.place(address) for address in addresses]
    for address, place in zip(addresses, places.tolist(), strict=True):
        assert memory.data[place : place + 1].tobytes() == memory.true_bytes(address, 8)
    live = memory.live(np.array(addresses), count)
    for address, place, row in zip(addresses, places.tolist(), live, strict=True):
        assert row.tobytes() == (memory.true_bytes(address, 8 * count) if place else bytes(8 * count))


@given(st.lists(st.tuples(NEAR_AN_EDGE, st.integers(0, 40)), max_size=10), st.sampled_from([-16, -8, 8, 24]))
def test_spans_are_the_words_of_each_one_after_the_other(spans: list[tuple[int, int]], step: int) -> None:
    memory = SparseMemory(SPARSE)
    spans = [(address & ~7, count) for address, count in spans if memory.place(address)]
    starts, counts = [start for start, _ in spans], [count for _, count in spans]
    found, which = memory.spans(np.array(starts, np.int64), np.array(counts, np.int64), step)
    pairs = [(at, number) for number, count in enumerate(counts) for at in range(count)]
    assert which.tolist() == [number for _, number in pairs]
    words = [memory.true_bytes(starts[number] + at * step, 8) for at, number in pairs]
    assert found.astype(np.int64).tobytes() == b"".join(words)


def test_a_mapping_is_found_by_any_of_its_addresses() -> None:
    memory = SparseMemory(SPARSE)
    for start, size in SPARSE.items():
        for address in (start, start + size - 1):
            mapping = memory.mapping_at(address)
            assert mapping is not None
            assert mapping.start == start
    assert memory.mapping_at(START - 1) is None
    assert memory.mapping_at(START + 2 * PAGE) is None
    assert memory.mapping_at(FAR + PAGE) is None


def test_a_chunk_is_copied_once_with_its_tail_and_only_what_is_mapped() -> None:
    memory = SparseMemory(SPARSE)
    assert memory.word(START) and memory.word(START + PAGE)
    assert memory.copied == [
        (START, 2 * PAGE), (START + 3 * PAGE, PAGE), (START + CHUNK - PAGE, 2 * PAGE)
    ]  # fmt: skip
    assert memory.bytes_read == 5 * PAGE
    assert memory.asked() == [START // CHUNK]
    memory.word(START + 2 * CHUNK)  # nothing is mapped there
    assert memory.bytes_read == 5 * PAGE
    assert memory.asked() == [START // CHUNK]


def test_chunks_read_ahead_count_as_asked_only_when_something_asks() -> None:
    memory = SparseMemory(SPARSE)
    last = (FAR + (2 << 30)) // CHUNK
    memory.read_ahead([START // CHUNK, last, last + 1])
    copied = list(memory.copied)
    assert memory.asked() == []
    assert memory.word(FAR + (2 << 30) + CHUNK)
    assert memory.asked() == [last + 1]
    memory.read_ahead([last])
    assert memory.copied == copied


def test_what_is_beyond_the_most_bytes_reads_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_memory, "MOST_BYTES", 3 * (CHUNK + 4096))
    memory = FakeMemory(b"\xff" * 8 * CHUNK)
    assert memory.byte(START) == memory.byte(START + CHUNK) == 0xFF
    assert not memory.full
    assert memory.byte(START + 2 * CHUNK) == 0
    assert memory.full
    assert memory.bytes_read == 2 * (CHUNK + 4096)


def test_a_question_is_about_a_limited_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_memory, "LONGEST_READ", 64)
    memory = FakeMemory(b"\x01" * CHUNK)
    assert len(memory.words(START, 9)) == 8
    assert len(memory.text_bytes(START + 3, 65)) == 64
    assert memory.words(START, 0) == memory.words(-8, 3) == []
    assert memory.text_bytes(START, 0) == memory.text_bytes(-1, 3) == b""


def test_own_chunks_are_private_anonymous_ones_small_mappings_first() -> None:
    class Nothing(RemoteMemory):
        def _copy(self, parts: Sequence[tuple[int, int, int]]) -> int:
            return 0

    def mapping(chunk: int, size: int, path: str = "", shared: bool = False) -> Mapping:
        return Mapping(chunk * CHUNK, chunk * CHUNK + size, True, shared, path)

    memory = Nothing(
        [
            mapping(10, 3 * CHUNK),
            mapping(20, CHUNK + 1, "[heap]"),
            mapping(30, CHUNK, "/usr/lib/libtorch.so"),
            mapping(40, CHUNK, shared=True),
            mapping(50, CHUNK),
        ]
    )
    assert memory.own_chunks() == [50, 20, 21, 10, 11, 12]


def test_own_chunks_end_at_the_bytes_that_are_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_memory, "READ_FIRST", 3 * CHUNK)
    memory = FakeMemory(bytes(5 * CHUNK))
    assert memory.own_chunks() == [START // CHUNK + at for at in range(3)]


@pytest.mark.parametrize(
    ("line", "readable"),
    [
        ("7f00-7f01 r--p 0 00:00 0 [vvar]", False),
        ("7f00-7f01 r-xp 0 00:00 0 [vsyscall]", False),
        ("7f00-7f01 rw-p 0 00:00 0 [heap]", True),
        ("7f00-7f01 rw-s 0 00:00 0 /dev/shm/torch_1", True),
        ("7f00-7f01 rw-s 0 00:00 0 /dev/zero (deleted)", True),
        ("7f00-7f01 rw-s 0 00:00 0 /dev/nvidiactl", False),
        ("7f00-7f01 -w-p 0 00:00 0", False),
    ],
)
def test_which_mappings_are_read(line: str, readable: bool) -> None:
    [mapping] = parse_maps(line)
    assert (mapping.start, mapping.end, mapping.readable) == (0x7F00, 0x7F01, readable)
