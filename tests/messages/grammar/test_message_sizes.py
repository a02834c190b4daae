"""Sizes as messages print them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages.grammar.message import SIZE, as_printed, printed_unit, to_bytes

WHOLE = re.compile(SIZE)


@pytest.mark.parametrize(
    ("number", "unit", "nbytes"),
    [
        ("2.87", "GiB", 3081639035),
        ("1024.00", "MiB", 1024**3),
        ("0", "bytes", 0),
        ("607.00", "KiB", 621568),
        ("18.02", "GB", 19348827668),
        ("26,184,840", "kB", 26184840 * 1024),
        ("1044902.00", "GiB", 1121954979381248),
        ("17179869184.00", "GiB", None),
        ("8589934592.00", "GiB", None),
        ("8589934591.00", "GiB", (2**33 - 1) * 1024**3),
    ],
)
def test_bytes_of_a_printed_size(number: str, unit: str, nbytes: int | None) -> None:
    assert to_bytes(number, unit) == nbytes


@settings(deadline=None)
@given(st.integers(0, 2**50))
def test_printed_sizes_are_read_back_within_half_a_digit(nbytes: int) -> None:
    (size,) = WHOLE.findall(as_printed(nbytes).replace(" ", ""))
    read = to_bytes(*size)
    assert read is not None
    assert abs(read - nbytes) <= printed_unit(nbytes) / 200 + 1


def test_a_size_behind_a_full_stop_is_no_fraction() -> None:
    assert re.findall(rf"{SIZE}allowed", "isfree.1.20GiBallowed;") == [("1.20", "GiB")]


def test_a_number_without_its_unit_is_no_size() -> None:
    assert WHOLE.search("Oftheallocatedmemory139.22") is None


@pytest.mark.parametrize(
    ("nbytes", "printed"),
    [
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (1024**2, "1024.00 KiB"),
        (1024**2 + 1, "1.00 MiB"),
        (1024**2 + 1024 * 10, "1.01 MiB"),
        (1024**3, "1024.00 MiB"),
        (1024**3 + 1, "1.00 GiB"),
        (0, "0 bytes"),
        (3 * 1024**3, "3.00 GiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_printed_as_torch_prints_them(nbytes: int, printed: str) -> None:
    assert as_printed(nbytes) == printed


def test_a_count_of_bytes_has_64_bits() -> None:
    assert to_bytes("18,446,744,073,709,551,615") == 2**64 - 1
    assert to_bytes("18446744073709551616") is None
