"""This process's own memory is read without risk."""

from __future__ import annotations

import ctypes

import pytest

from memtriage.outside.own_memory import own_bytes, own_words


def test_bytes_and_words_are_those_at_an_address() -> None:
    buffer = ctypes.create_string_buffer(bytes(range(1, 25)))
    address = ctypes.addressof(buffer)
    assert own_bytes(address, 5) == bytes(range(1, 6))
    assert own_words(address, 3) == [int.from_bytes(bytes(range(at, at + 8)), "little") for at in (1, 9, 17)]
    assert (own_bytes(address, 0), own_words(address, 0)) == (b"", [])


@pytest.mark.parametrize("address", [0, 8, -8, 1 << 63, 1 << 70])
def test_what_is_not_mapped_is_zeros(address: int) -> None:
    assert own_bytes(address, 5) == bytes(5)
    assert own_words(address, 2) == [0, 0]
