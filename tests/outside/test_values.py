"""Texts, numbers and containers read by their addresses: those of this process, which are known."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import OrderedDict, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.outside.memory import ProcessMemory
from memtriage.outside.python_layout import layout_of
from memtriage.outside.values import LONGEST_TEXT, RemoteValues
from support.outside_parts import moved

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)


def values() -> RemoteValues:
    """Reads this process as it is now."""
    layout = layout_of(sys.version_info[:2])
    assert layout is not None
    return RemoteValues(ProcessMemory(os.getpid()), layout, lambda address: address)


def ids(items: Any) -> list[int]:
    return list(map(id, items))


@pytest.mark.parametrize("text", ["", "a", "losses", "Größe", "模型", "😀 x", "x" * LONGEST_TEXT])
def test_texts_of_any_width(text: str) -> None:
    assert values().text(id(text)) == text


def test_of_a_long_text_the_beginning_is_read() -> None:
    long, wide = "abc" * 200, "模" * 400
    assert values().text(id(long)) == long[:LONGEST_TEXT]
    assert values().text(id(wide)) == wide[:LONGEST_TEXT]


def test_what_is_no_text_has_none() -> None:
    some: list[Any] = [b"bytes", 5, ["a"], None]
    reader = values()
    assert [reader.text(id(each)) for each in some] == [None] * 4
    assert reader.text(0) is None and reader.text(id("text") + 1) is None


NUMBERS = [0, 1, 255, 2**30 - 1, 2**30, 2**30 + 7, 2**60 - 1, 2**60, 2**60 + 5, 2**62, 2**90 - 1]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_up_to_three_digits(number: int) -> None:
    assert values().number(id(number)) == number


@pytest.mark.parametrize("other", [-1, -(2**40), 2**90, 1.5, "1", None])
def test_what_is_no_such_number_has_none(other: Any) -> None:
    assert values().number(id(other)) is None
    assert values().number(0) is None


def test_a_text_of_c_ends_with_its_zero() -> None:
    buffer = ctypes.create_string_buffer(b"cuda:0\0more")
    assert values().c_text(ctypes.addressof(buffer)) == "cuda:0"


@given(st.lists(st.integers(1000, 10**9), max_size=40))
def test_containers_have_their_entries_in_order(numbers: list[int]) -> None:
    some: dict[str, Any] = {"list": list(numbers), "tuple": tuple(numbers), "set": set(numbers),
                            "deque": deque(numbers)}  # fmt: skip
    reader = values()
    assert reader.list_items(id(some["list"])) == ids(some["list"])
    assert reader.tuple_items(id(some["tuple"])) == ids(some["tuple"])
    assert reader.deque_items(id(some["deque"])) == ids(some["deque"])
    assert sorted(reader.set_items(id(some["set"]))) == sorted(ids(some["set"]))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("popped", [0, 1, 63])
def test_a_deque_may_begin_anywhere_in_its_first_block(length: int, popped: int) -> None:
    queue = deque(object() for _ in range(length + popped))
    for _ in range(popped):
        queue.popleft()
    assert values().deque_items(id(queue)) == ids(queue)


class Split:
    """Its attributes share their keys with those of other objects."""

    def __init__(self) -> None:
        self.first, self.second = object(), object()


DICTS: dict[str, dict[Any, Any]] = {
    "empty": {},
    "names": {"a": object(), "b": object()},
    "other keys": {1: object(), (2,): object(), "c": object()},
    "many": {f"name {number}": object() for number in range(500)},
    "with a gap": {"a": 1, "b": 2, "c": 3},
    "ordered": OrderedDict(a=object(), b=object()),
    "shared keys": vars(Split()),
}
del DICTS["with a gap"]["b"]


@pytest.mark.parametrize("name", DICTS)
def test_a_dict_has_its_keys_and_values_in_order(name: str) -> None:
    given_dict = DICTS[name]
    reader = values()
    assert reader.dict_items(id(given_dict)) == [(id(key), id(value)) for key, value in given_dict.items()]
    assert reader.named_items(id(given_dict)) == [
        (key, id(value)) for key, value in given_dict.items() if isinstance(key, str)
    ]
    for key, value in given_dict.items():
        if isinstance(key, str):
            assert reader.dict_value(id(given_dict), key) == id(value)
    assert reader.dict_value(id(given_dict), "not there") == 0


@pytest.mark.parametrize("length", [3, 100])
def test_a_list_whose_array_was_copied_before_it_moved_there_is_copied_again(length: int) -> None:
    reader, grows = values(), [object() for _ in range(length)]
    where = (ctypes.c_int64 * 4096)(*range(1, 4097))  # no addresses of objects
    array = (ctypes.addressof(where) + 4095) & ~4095
    reader.memory.words(array, 512)
    with moved(id(grows) + reader.layout.list_items, array, 8 * length):
        assert reader.list_items(id(grows)) == ids(grows)


def test_a_list_whose_array_is_where_nothing_was_mapped_is_read() -> None:
    reader, grows = values(), [object() for _ in range(3)]
    with mmap.mmap(-1, 1 << 20) as mapped:
        room = ctypes.c_int64.from_buffer(mapped)
        array = ctypes.addressof(room)
        if reader.memory.mapping_at(array):
            pytest.skip("the kernel gave what was mapped before")
        with moved(id(grows) + reader.layout.list_items, array, 24):
            assert reader.list_items(id(grows)) == ids(grows)
        del room


@pytest.mark.parametrize("length", [3, 100])
def test_a_dict_whose_entries_were_copied_before_it_moved_there_is_copied_again(length: int) -> None:
    reader, grows = values(), {f"name {number}": object() for number in range(length)}
    where = (ctypes.c_int64 * 4096)()
    keys = (ctypes.addressof(where) + 4095) & ~4095
    reader.memory.words(keys, 512)
    with moved(id(grows) + reader.layout.dict_keys, keys, 64 * length):
        assert reader.dict_items(id(grows)) == [(id(key), id(value)) for key, value in grows.items()]


def test_sizes_that_nothing_has_make_no_entries() -> None:
    layout = layout_of(sys.version_info[:2])
    assert layout is not None
    for word in (1 << 40, 0):
        words = (ctypes.c_int64 * 64)(*[word] * 64)
        reader, address = values(), ctypes.addressof(words)
        for read in (
            reader.list_items,
            reader.tuple_items,
            reader.set_items,
            reader.deque_items,
            reader.dict_items,
        ):
            assert read(address) == []
