"""Memory of a process that does not exist, with what a test puts there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from memtriage.outside.memory import CHUNK, Mapping, RemoteMemory
from memtriage.outside.objects import RemoteHeap
from memtriage.outside.python_layout import layout_of

START: Final = 64 * CHUNK
SIZE: Final = 4 * CHUNK


class FakeMemory(RemoteMemory):
    """Bytes at an address, as a process may have them."""

    def __init__(self, data: bytes, start: int = START) -> None:
        super().__init__([Mapping(start, start + len(data), readable=True, shared=False, path="")])
        self._data = data
        self._start = start

    def _copy(self, parts: Sequence[tuple[int, int, int]]) -> int:
        copied = 0
        for address, size, at in parts:
            data = self._data[address - self._start :][:size]
            self.raw[at : at + len(data)] = data
            copied += len(data)
        return copied


def hostile_memory(chance: random.Random, pointers: bool) -> FakeMemory:
    """SIZE bytes at START: random ones, or random pointers into themselves, where objects should be."""
    if pointers:
        words = (START + 8 * chance.randrange(SIZE >> 3) for _ in range(4096))
        return FakeMemory(b"".join(word.to_bytes(8, "little") for word in words) * (SIZE >> 15))
    return FakeMemory(chance.randbytes(1 << 15) * (SIZE >> 15))


def own_address(address: int) -> int:
    """Return where hostile memory has what is at an address of this process."""
    return START + address % SIZE & ~7


def hostile_heap(seed: int, pointers: bool, minor: int) -> tuple[random.Random, RemoteHeap]:
    """The heap of a Python 3.`minor` in hostile memory, and what drew it."""
    chance, layout = random.Random(seed), layout_of((3, minor))
    assert layout is not None
    return chance, RemoteHeap(hostile_memory(chance, pointers), layout, own_address)
