"""Growth of sites over steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.snapshots.growth import SiteGrowth, growing_sites
from memtriage.snapshots.sites import SiteSeries


def grows(values: Sequence[int], blocks: Sequence[int] | None = None, every: int = 1) -> list[SiteGrowth]:
    steps = np.arange(1, len(values) + 1) * every
    counts = values if blocks is None else blocks
    return growing_sites(SiteSeries(steps, np.array([values]), np.array([counts])))


@given(
    start=st.integers(0, 1 << 40),
    rate=st.integers(1, 1 << 30),
    steps=st.integers(4, 200),
    every=st.integers(1, 9),
)
def test_a_steady_rise_is_found_with_its_very_rate(start: int, rate: int, steps: int, every: int) -> None:
    (found,) = grows([start + rate * step for step in range(steps)], every=every)
    assert found.rate == pytest.approx(rate / every)


@given(
    before=st.integers(0, 100), after=st.integers(0, 100), rise=st.integers(0, 9), steps=st.integers(9, 60)
)
def test_one_rise_is_no_growth(before: int, after: int, rise: int, steps: int) -> None:
    at = min(rise, steps)
    assert grows([before] * at + [after] * (steps - at)) == []


@given(st.integers(9, 100), st.integers(2, 40))
def test_what_fills_to_a_bound_and_stays_there_is_no_growth(steps: int, bound: int) -> None:
    bound = min(bound, steps * 2 // 3 - 1)
    assert grows([min(step, bound) for step in range(steps)]) == []


def test_a_sawtooth_whose_floor_rises_is_growth() -> None:
    (found,) = grows([10 * step + (7 if step % 3 else 0) * 10 for step in range(30)])
    assert found.rate == pytest.approx(10, rel=0.2)


def test_more_bytes_in_as_many_blocks_prove_nothing_at_first() -> None:
    assert grows([1, 2, 3, 4, 5], [1, 1, 1, 1, 1]) == []
    assert len(grows([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])) == 1


def test_three_steps_are_too_few() -> None:
    assert grows([1, 2, 3]) == []


def test_the_fastest_comes_first() -> None:
    steps = np.arange(1, 13)
    table = np.stack([steps * 3, steps * 0 + 5, steps * 8])
    assert [site.site for site in growing_sites(SiteSeries(steps, table, table))] == [2, 0]
