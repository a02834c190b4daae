"""Floors of a counter, rises within a step, and how long memory lasts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.marks import (
    POLICY,
    Series,
    floor_growth,
    floors,
    period_within_step,
    policy_for,
    recent_growth,
    steps_left,
    went_on_within_step,
)

KIB = 1024
MIB = 1024 * KIB


def series(values: list[int]) -> Series:
    made = Series()
    for step, value in enumerate(values, 1):
        made.add(step, value)
    return made


@pytest.mark.parametrize(
    ("values", "rate"),
    [
        ([1, 3, 5, 2, 5, 5, 3, 5, 5], 2 / 6),  # from the first 1 to the 3 of the last window
        ([9, 9, 1, 2, 9, 9, 9, 9, 4], 3 / 6),
        ([1, 2, 3, 4, 5], None),  # too few for three windows of two
        ([1, 1, 2, 2, 3, 3], 2 / 4),
        ([1, 1, 2, 2, 2, 2], None),
    ],
)
def test_a_floor_rises_from_where_it_was_touched_first_to_the_last_window(
    values: list[int], rate: float | None
) -> None:
    assert floor_growth(series(values)) == (None if rate is None else pytest.approx(rate))


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=5), st.integers(10, 60))
def test_a_flat_or_periodic_counter_is_never_suspected(cycle: list[int], length: int) -> None:
    values = [cycle[step % len(cycle)] for step in range(length * len(cycle))]
    assert floor_growth(series(values)) is None


@given(st.integers(KIB, 1 << 30), st.integers(0, 1 << 34), st.integers(9, 60))
def test_recent_growth_is_bytes_a_step(rate: int, base: int, steps: int) -> None:
    assert recent_growth(series([base + rate * step for step in range(steps)])) == rate


def test_recent_growth_is_zero_when_flat_unknown_when_short() -> None:
    assert recent_growth(series([5] * 20)) == 0
    assert recent_growth(series([step * 100 for step in range(20)])) == 0  # a step's own bookkeeping
    assert recent_growth(series([1000 * KIB * min(step, 6) for step in range(40)])) == 0  # has filled
    assert recent_growth(series([KIB * step for step in range(8)])) is None


@given(st.integers(1, 1 << 20), st.integers(3, 20))
def test_micro_batches_that_rise_are_suspected_by_the_fourth(extra: int, count: int) -> None:
    values = [5_000_000 + (64 * KIB + extra) * index for index in range(count)]
    assert period_within_step(values[:4]) == (1 if count >= 4 else None)


@given(st.integers(1, 8), st.lists(st.integers(0, 1 << 28), min_size=8, max_size=8), st.integers(3, 40))
def test_several_backwards_are_suspected_by_third_micro_batch(
    backwards: int, within: list[int], microbatches: int
) -> None:
    values = [
        within[i % backwards] + 64 * KIB * (i // backwards) for i in range(backwards * microbatches + 1)
    ]
    period = period_within_step(values)
    assert period is not None and period <= backwards
    assert all(b - a >= 1024 for a, b in zip(values[-12:], values[-12:][period:], strict=False))


@given(st.integers(1, 8), st.lists(st.integers(0, 1 << 28), min_size=8, max_size=8), st.integers(1, 60))
def test_micro_batches_that_come_back_to_where_they_were_are_not(
    backwards: int, within: list[int], count: int
) -> None:
    values = [within[i % backwards] for i in range(count * backwards)]
    period = period_within_step(values)
    assert period is None or count <= 3  # three rises by chance are no proof, and cost a census


def test_the_first_gradients_and_flat_accumulation_are_not() -> None:
    assert period_within_step([0, 4_000_000, 4_000_000, 4_000_000, 4_000_000]) is None
    assert period_within_step([0, 4_000_000]) is None


@pytest.mark.parametrize(
    ("values", "goes_on"),
    [
        pytest.param([min(at, 14) * 64 * KIB for at in range(40)], False, id="filled"),
        pytest.param([at * 64 * KIB for at in range(40)], True, id="leaks"),
        pytest.param([at * 64 * KIB + at % 4 * MIB for at in range(40)], True, id="leaks under noise"),
        pytest.param([at * 64 * KIB for at in range(14)], None, id="too short"),
    ],
)
def test_what_fills_within_a_step_stops_and_what_leaks_goes_on(
    values: list[int], goes_on: bool | None
) -> None:
    assert went_on_within_step(series(values), since=12, rate=64 * KIB) is goes_on


@given(st.lists(st.integers(0, 100), min_size=3, max_size=50), st.integers(1, 3))
def test_floors_cover_every_value(values: list[int], windows: int) -> None:
    low = floors(values, windows)
    assert len(low) == windows
    assert min(low) == min(values)


def test_fewer_values_than_windows_have_no_floors() -> None:
    assert floors([5, 4], 3) == []
    assert floors([5, 4, 6, 3], 3) == [5, 4, 3]


def test_a_long_series_stays_bounded_and_keeps_its_ends() -> None:
    made = series(list(range(20_000)))
    assert len(made.values) <= 4096
    assert made.positions[0] == 1
    assert made.positions[-1] == 20_000
    assert made.positions == sorted(made.positions)


def test_projection() -> None:
    assert steps_left(1000, 400, 100.0) == 6
    assert steps_left(None, 400, 100.0) is None
    assert steps_left(1000, 1000, 100.0) == steps_left(1000, 1400, 100.0) == 0
    assert steps_left(1000, None, 100.0) is None
    assert [steps_left(1000, 400, rate) for rate in (0.0, -1.0, None)] == [None] * 3


def test_counters_that_drift_by_themselves_have_a_higher_floor() -> None:
    floors = {counter: policy_for(counter).floor_bytes for counter in ("cpu", "shared", "cuda:0", "host")}
    assert floors == {"cpu": 8192, "shared": 16384, "cuda:0": POLICY.floor_bytes, "host": POLICY.floor_bytes}
