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
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.outside.memory import (
    CHUNK,
    ForbiddenError,
    GoneError,
    ProcessMemory,
    parse_maps,
)
from memtriage.outside.objects import RemoteHeap
from memtriage.outside.python_layout import layout_of
from support.remote_memory import SIZE, START, FakeMemory, hostile_memory


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
    chance = random.Random(seed)
    memory = hostile_memory(chance, pointers)
    layout = layout_of((3, minor))
    assert layout is not None
    heap = RemoteHeap(memory, layout, lambda own: START + own % SIZE & ~7)
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
    assert 2 * CHUNK <= memory.data.nbytes < 10 * CHUNK


class ChangingMemory(FakeMemory):
    """Has other bytes at each copy."""

    def _copy(self, parts: Sequence[tuple[int, int, int]]) -> int:
        self._data = bytes(byte + 1 for byte in self._data)
        return super()._copy(parts)


def test_only_the_chunks_of_a_range_are_copied_again() -> None:
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
