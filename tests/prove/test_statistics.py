"""Intervals that hold as surely as they say, whatever the distribution."""

from __future__ import annotations

from itertools import product
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.prove.statistics import CONFIDENCE, median_interval, paired, ratio

VALUES = st.lists(st.floats(0.001, 1000), min_size=2, max_size=30)


@pytest.mark.parametrize("count", range(2, 13))
def test_the_interval_encloses_the_median_as_often_as_it_says(count: int) -> None:
    # Only whether each value is above the true median matters, and that is a coin's toss: try all tosses.
    enclosed = 0
    for tosses in product((-1.0, 1.0), repeat=count):
        values = [toss * (1 + place / 100) for place, toss in enumerate(tosses)]
        interval = median_interval(values)
        assert interval is not None
        enclosed += interval.low <= 0 <= interval.high
    assert enclosed / 2**count == pytest.approx(interval.confidence)


@pytest.mark.parametrize(
    ("count", "confidence"), [(2, 0.5), (3, 0.75), (4, 0.875), (5, 0.9375), (6, 0.96875), (8, 0.9921875)]
)
def test_few_values_are_as_sure_as_they_can_be(count: int, confidence: float) -> None:
    values = [float(value) for value in range(count)]
    interval = median_interval(values)
    assert interval is not None
    assert interval.confidence == pytest.approx(confidence)
    assert (interval.low, interval.high) == (0.0, count - 1.0)


def test_many_values_are_narrower_than_their_extremes() -> None:
    interval = median_interval([float(value) for value in range(20)])
    assert interval is not None
    assert (interval.low, interval.high) == (5.0, 14.0)
    assert interval.confidence >= CONFIDENCE


@given(VALUES)
def test_an_interval_holds_the_median_of_its_values(values: list[float]) -> None:
    interval = median_interval(values)
    assert interval is not None
    assert interval.low <= median(values) <= interval.high


def test_one_value_has_no_interval() -> None:
    assert median_interval([1.0]) is None
    assert ratio([[1.0]], [[2.0]]) == (0.5, None)


@given(st.lists(VALUES, min_size=3, max_size=8), st.floats(0.5, 2.0))
def test_a_ratio_is_found_again(trials: list[list[float]], factor: float) -> None:
    estimate = ratio([[factor * value for value in steps] for steps in trials], trials)
    assert estimate is not None
    value, interval = estimate
    assert value == pytest.approx(factor)
    assert interval is not None
    assert interval.basis == "trials"
    assert interval.low == pytest.approx(factor)
    assert interval.high == pytest.approx(factor)


def test_drift_that_both_share_is_not_in_the_ratio() -> None:
    other = [[level] * 3 for level in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)]
    own = [[1.01 * level] * 3 for level in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)]
    estimate = ratio(own, other)
    assert estimate is not None
    value, interval = estimate
    assert value == pytest.approx(1.01)
    assert interval is not None
    assert interval.high - interval.low < 1e-9


def test_few_trials_fall_back_on_their_steps_and_say_so() -> None:
    estimate = ratio([[1.1, 2.2, 4.8, 3.3, 1.0]], [[1.0, 2.0, 4.0, 3.0, 1.0]])
    assert estimate is not None
    value, interval = estimate
    assert value == pytest.approx(1.1)
    assert interval is not None
    assert (interval.basis, interval.confidence) == ("steps", 0.9375)
    assert (interval.low, interval.high) == (pytest.approx(1.0), pytest.approx(1.2))


def test_one_figure_a_trial_is_no_step() -> None:
    pairs = paired([[1.0], [2.0]])
    assert pairs is not None
    value, interval = pairs
    assert value == 1.5
    assert interval is not None
    assert (interval.basis, interval.confidence) == ("trials", 0.5)


def test_rounds_count_as_one_each_however_many_steps_they_have() -> None:
    assert paired([[1.0] * 100, [2.0], [3.0, 4.0]]) == (2.0, median_interval([1.0, 2.0, 3.5]))
    assert paired([[], []]) is None


def test_there_is_no_ratio_to_nothing() -> None:
    assert ratio([], []) is None
    assert ratio([[1.0]], [[0.0]]) is None
