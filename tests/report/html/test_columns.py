"""A packed column holds every number exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.report.html.columns import EXACT, LONGEST_TEXT, Texts, pack
from support.page_data import unpack


@given(st.lists(st.integers(-EXACT // 2, EXACT // 2)))
def test_every_number_comes_back(values: list[int]) -> None:
    assert unpack(pack(np.asarray(values, dtype=np.int64))) == values


@given(st.lists(st.integers(0, 1 << 30), min_size=1), st.sampled_from([1, 512, 2 << 20]))
def test_a_common_unit_keeps_a_column_small(values: list[int], unit: int) -> None:
    column = pack(np.asarray(values, dtype=np.int64) * unit)
    assert unpack(column) == [value * unit for value in values]
    assert column["type"] != "f8"


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1))
def test_a_number_that_no_browser_holds_is_rounded(values: list[int]) -> None:
    for value, shown in zip(values, unpack(pack(np.asarray(values, dtype=np.int64))), strict=True):
        assert shown == pytest.approx(value, rel=2**-52)


def test_a_text_stands_once_and_is_cut() -> None:
    texts = Texts()
    assert [texts.add("a"), texts.add("b" * 2 * LONGEST_TEXT), texts.add("a")] == [0, 1, 0]
    assert texts.all == ["a", "b" * (LONGEST_TEXT - 1) + "…"]
    assert texts.characters == LONGEST_TEXT + 1


def test_long_texts_that_differ_late_stay_two() -> None:
    texts = Texts()
    assert texts.add("x" * LONGEST_TEXT + "1") != texts.add("x" * LONGEST_TEXT + "2")
