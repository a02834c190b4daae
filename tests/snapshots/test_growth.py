"""Growth of sites over steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.evidence import WARM_UP
from memtriage.snapshots.growth import RECORDED_POLICY, SiteGrowth, growing_sites
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


def test_what_ends_below_where_it_began_does_not_grow() -> None:
    assert grows([100, 1, 2, 3, 4]) == []


def test_the_first_step_need_not_rise() -> None:
    (growth,) = grows([5, 4, 6, 8, 10])
    assert growth.rate == pytest.approx(2)


def test_bytes_and_blocks_rise_at_every_step_of_a_short_recording() -> None:
    assert grows([1, 2, 3, 3, 4]) == []
    assert grows([1, 2, 3, 4, 5], [1, 2, 3, 3, 4]) == []


def test_many_steps_may_pause_where_nothing_falls_back() -> None:
    many = RECORDED_POLICY.many
    values = [step // 2 for step in range(2 * many)]
    (growth,) = grows(values)
    assert growth.rate == (values[-1] - values[WARM_UP]) / (len(values) - 1 - WARM_UP)
    assert grows(values[: many - 1]) == []


def test_the_rate_of_what_never_falls_back_is_over_the_whole_recording() -> None:
    values = [min(step, 20) * 100 + step for step in range(60)]
    (growth,) = grows([value + (100 * step if step > 40 else 0) for step, value in enumerate(values)])
    assert growth.rate == pytest.approx((values[-1] + 5900 - values[WARM_UP]) / (59 - WARM_UP))


@pytest.mark.parametrize(("last", "grown"), [(1, False), (5, True)])
def test_growth_must_go_on_in_the_last_third(last: int, grown: bool) -> None:
    values = [10 * step for step in range(20)]
    for _ in range(10):
        values.append(values[-1] + last)
    assert bool(grows(values)) == grown


def test_as_many_blocks_now_larger_now_smaller_are_no_growth() -> None:
    values = [10 * step + (70 if step % 3 else 0) for step in range(30)]
    assert grows(values, [4] * 30) == []
    assert len(grows(values, [4 + step // 10 for step in range(30)])) == 1
