"""Objects of another process whose layout is fixed: texts, numbers and containers, by their addresses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import numpy as np

from memtriage.outside.memory import RemoteMemory, Words
from memtriage.outside.python_layout import PythonLayout

LONGEST_TEXT: Final = 300
MOST_ITEMS: Final = 8_000_000
"""Entries of one container that are looked at; what claims more is no container."""
_HEAD_WORDS: Final = 4
"""Words of a list or dict from its size on: they have the addresses of its arrays."""
_LARGEST_ENTRY: Final = 40
"""Bytes per entry of a dict at most: 24, and up to 8 for each place, of which there are more."""
_LARGEST_HEAD: Final = 64
"""Bytes before a dict's entries, and more."""
_NEGATIVE: Final = 2
"""Of the tag of an int, since Python 3.12."""

Translate = Callable[[int], int | None]
"""From an address in a file of this process to that of the same thing in the other one; None: not there."""


class RemoteValues:
    """Reads texts, numbers that are names, and containers."""

    def __init__(self, memory: RemoteMemory, layout: PythonLayout, translate: Translate) -> None:
        self.memory = memory
        self.layout = layout
        self._translate = translate

    def _address_of(self, klass: type) -> int:
        address = self._translate(id(klass))
        return 0 if address is None else address

    # --- text and numbers that are names ---

    def text(self, address: int) -> str | None:
        """Return a string; None where there is none, and of a long one the beginning."""
        if not address or address & 7:
            return None
        memory, layout = self.memory, self.layout
        if memory.word(address + 8) != self._text_type:
            return None
        length = min(memory.word(address + layout.text_length), LONGEST_TEXT)
        state = memory.half(address + layout.text_state)
        width, compact, is_ascii = state >> 2 & 7, state >> 5 & 1, state >> 6 & 1
        if not compact or width not in (1, 2, 4):
            return None
        start = address + (layout.text_ascii if is_ascii else layout.text_other)
        codec = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[width]
        return memory.text_bytes(start, length * width).decode(codec, "replace")

    @functools.cached_property
    def _text_type(self) -> int:
        return self._address_of(str)

    def number(self, address: int) -> int | None:
        """Return an int that is no longer than a word, and not negative; None of anything else."""
        memory, layout = self.memory, self.layout
        if not address or memory.word(address + 8) != self._address_of(int):
            return None
        tag = memory.signed(address + layout.size)
        digits = tag >> layout.number_tag_bits
        if not 0 <= digits <= 3 or tag & (1 << layout.number_tag_bits) - 1 & _NEGATIVE:
            return None
        return sum(memory.half(address + layout.number_digits + 4 * at) << 30 * at for at in range(digits))

    def c_text(self, address: int) -> str:
        """Return a text of C, which ends with a zero."""
        return self.memory.text_bytes(address, LONGEST_TEXT).split(b"\0")[0].decode("utf-8", "replace")

    # --- containers ---

    def renew(self, objects: Words) -> None:
        """Copy lists and dicts again, with their arrays.

        An array that grows moves, maybe to where nothing was mapped. Its old place is used for other things.
        If one was copied before the move and the other after it, what is read are no objects, or too few.
        """
        memory, first = self.memory, self.layout.size // 8
        if memory.steady or not len(objects):
            return
        memory.map_again()
        heads = memory.live(objects + self.layout.size, _HEAD_WORDS)
        memory.copy_again(objects, np.full(len(objects), 8 * (first + _HEAD_WORDS)))
        sizes = np.clip(heads[:, 0], 0, MOST_ITEMS) * _LARGEST_ENTRY + _LARGEST_HEAD
        for arrays in heads[:, 1:].T:
            memory.copy_again(arrays, sizes)

    def list_items(self, address: int) -> list[int]:
        items = self._list_items(address)
        if any(item <= 4096 or item & 7 for item in items):
            self.renew(np.array([address], np.int64))
            items = self._list_items(address)
        return items

    def _list_items(self, address: int) -> list[int]:
        memory, layout = self.memory, self.layout
        count = memory.word(address + layout.size)
        if not 0 < count <= MOST_ITEMS:
            return []
        return memory.words(memory.word(address + layout.list_items), count)

    def tuple_items(self, address: int) -> list[int]:
        count = self.memory.word(address + self.layout.size)
        if not 0 < count <= MOST_ITEMS:
            return []
        return self.memory.words(address + self.layout.tuple_items, count)

    def set_items(self, address: int) -> list[int]:
        memory, layout = self.memory, self.layout
        mask = memory.word(address + layout.set_mask)
        if mask >= MOST_ITEMS:
            return []
        table = memory.words(memory.word(address + layout.set_table), 2 * (mask + 1))
        return [key for key in table[::2] if key]

    def deque_items(self, address: int) -> list[int]:
        memory, layout = self.memory, self.layout
        count = memory.word(address + layout.size)
        if not 0 < count <= MOST_ITEMS:
            return []
        block = memory.word(address + layout.deque_left)
        at = memory.word(address + layout.deque_left_index)
        items: list[int] = []
        while block and at < layout.deque_block and len(items) < count:
            items += memory.words(block + 8 + 8 * at, min(layout.deque_block - at, count - len(items)))
            block, at = memory.word(block + 8 + 8 * layout.deque_block), 0
        return items

    def dict_items(self, address: int) -> list[tuple[int, int]]:
        """Return (key, value) of a dict, as addresses, in order."""
        items = self._dict_items(address)
        if len(items) < self.memory.word(address + self.layout.size) <= MOST_ITEMS:
            self.renew(np.array([address], np.int64))
            items = self._dict_items(address)
        return items

    def _dict_items(self, address: int) -> list[tuple[int, int]]:
        values = self.memory.word(address + self.layout.dict_values)
        return self._entries(self.memory.word(address + self.layout.dict_keys), values)

    def _entries(self, keys: int, values: int) -> list[tuple[int, int]]:
        memory, layout = self.memory, self.layout
        count = memory.word(keys + layout.keys_entries)
        index_bits = memory.byte(keys + layout.keys_log2_index_bytes)
        if not keys or not 0 < count <= MOST_ITEMS or index_bits > 40:
            return []
        start = keys + layout.keys_indices + (1 << index_bits)
        if memory.byte(keys + layout.keys_kind):
            words = memory.words(start, 2 * count)
            names, found = words[::2], words[1::2]
        else:
            words = memory.words(start, 3 * count)
            names, found = words[1::3], words[2::3]
        if values:
            found = memory.words(values + layout.values_start, len(names))
        return [(name, value) for name, value in zip(names, found, strict=False) if value]

    def named_items(self, address: int) -> list[tuple[str, int]]:
        """Return (key, value) of those entries of a dict whose keys are strings."""
        items = ((self.text(key), value) for key, value in self.dict_items(address))
        return [(name, value) for name, value in items if name is not None]

    def dict_value(self, address: int, name: str) -> int:
        """Return the address of a dict's value; 0 where it has no such key."""
        word, length = self.memory.word, self.layout.text_length
        for key, value in self.dict_items(address):
            if word(key + length) == len(name) and self.text(key) == name:
                return value
        return 0
