"""Lines through readings: the slope of most of them, and an error that is large where they swing."""

from __future__ import annotations

import numpy as np
import pytest

from memtriage.diagnose.growth.line import (
    POLICY,
    fit,
    levels,
    misfit,
    noise,
    quarter_rates,
    slopes,
)
from memtriage.diagnose.growth.track import Floats

AT: Floats = np.arange(240, dtype=np.float64)


def test_a_straight_line_is_fitted_without_error() -> None:
    line = fit(AT, 7.0 + 3.0 * AT, 24)
    assert line.rate == pytest.approx(3.0)
    assert line.error == pytest.approx(0.0, abs=1e-9)
    assert len(line.at) == len(line.values) == 24


def test_a_few_wild_readings_do_not_move_the_slope() -> None:
    values = 3.0 * AT
    values[[5, 100, 200]] += 1e6
    assert fit(AT, values, 240).rate == pytest.approx(3.0, rel=1e-6)


def test_the_error_covers_the_true_slope_of_noise_and_of_swings() -> None:
    misses: dict[str, list[float]] = {"noise": [], "swings": []}
    for seed in range(200):
        white = np.random.default_rng(seed).normal(0, 10, len(AT))
        swings = np.convolve(white, np.ones(20), "same")
        for name, values in (("noise", white), ("swings", swings)):
            line = fit(AT, values, 24)
            misses[name].append(abs(line.rate) / line.reach)
    for name, each in misses.items():
        assert np.mean(np.array(each) > 2.6) <= 0.08, name
        assert np.median(each) < 1.2, name


def test_an_error_never_falls_below_half_of_independent_noise() -> None:
    """Residuals that cancel out lag by lag would make the sum of Newey and West nearly 0."""
    at: Floats = np.arange(24, dtype=np.float64)
    values = np.where(at % 2 == 0, 1.0, -1.0)
    line = fit(at, values, 24)
    centered = at - at.mean()
    independent = np.sqrt(np.mean(values**2) / (centered @ centered))
    assert line.error >= POLICY.wider * np.sqrt(POLICY.independent) * independent * 0.99


def test_few_levels_make_the_errors_of_tests_and_intervals_larger() -> None:
    values = np.random.default_rng(1).normal(0, 1, 10)
    line = fit(np.arange(10.0), values, 24)
    assert line.uncertainty == pytest.approx(1.5 * line.error)
    assert line.reach == pytest.approx(1.3 * line.error)
    assert line.quarter_error == pytest.approx(3.3 * line.error)


def test_levels_are_the_readings_themselves_where_they_are_few() -> None:
    at, values = levels(AT[:47], AT[:47] ** 2, 24)
    assert len(at) == len(values) == 47
    at, values = levels(AT[:48], AT[:48] ** 2, 24)
    assert len(at) == len(values) == 24


def test_a_level_is_a_reading_in_the_lower_part_of_its_window() -> None:
    at, values = levels(AT, np.tile([0.0, 10.0, 20.0, 30.0, 40.0], 48), 24)
    assert set(values) == {10.0}
    assert all(value == (position % 5) * 10 for position, value in zip(at, values, strict=True))


def test_points_around_a_long_pause_make_levels_of_equally_many() -> None:
    at = np.concatenate((np.arange(60.0), 10_000 + np.arange(60.0)))
    line = fit(at, 5.0 * at, 24)
    assert len(line.at) == 24
    assert (line.rate, line.error) == (pytest.approx(5.0), pytest.approx(0.0, abs=1e-9))
    at[60:] -= 9_900  # a short pause leaves most spans their points
    assert len(fit(at, 5.0 * at, 24).at) < 24


def test_rates_of_quarters() -> None:
    assert quarter_rates(AT, 2.0 * AT, 0.25) == pytest.approx([2.0, 2.0, 2.0])
    slowing = quarter_rates(AT, np.minimum(AT, 120.0), 0.25)
    assert slowing[0] == pytest.approx(1.0)
    assert slowing[-1] == pytest.approx(0.0)
    gap = np.array([0.0, 1, 2, 3, 200, 201, 202, 203])  # two quarters of the time have no reading
    assert quarter_rates(gap, 5.0 * gap, 0.25) == pytest.approx([5.0, 5.0, 5.0])
    seldom = np.concatenate([np.arange(100.0), np.arange(100.0, 200.0, 10.0)])  # read more often at first
    assert quarter_rates(seldom, np.minimum(seldom, 95.0), 0.25)[-1] == 0


def test_growth_that_comes_in_random_sizes_makes_quarters_differ() -> None:
    steady = fit(AT, 3.0 * AT, 240)
    sizes = np.random.default_rng(3).exponential(3.0, len(AT))
    assert steady.difference_of_quarters() == pytest.approx(0.0, abs=1e-9)
    random = fit(AT, np.cumsum(sizes), 240)
    first, last = np.diff(random.values)[:59], np.diff(random.values)[-59:]
    assert abs(first.mean() - last.mean()) < 3 * random.difference_of_quarters()


def test_growth_that_slows_down_steadily_makes_no_larger_error() -> None:
    slowing = fit(AT, 1e6 * (1 - np.exp(-AT / 80)), 240)
    rates = np.diff(slowing.values)
    assert slowing.difference_of_quarters() < 0.25 * (rates[0] - rates[-1])


def test_slopes_within_spans() -> None:
    rates = slopes(AT, np.maximum(0.0, AT - 120.0), 4)
    assert rates is not None
    assert rates == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-2)
    assert slopes(AT[:12], AT[:12], 4) is not None
    assert slopes(AT[:11], AT[:11], 4) is None


def test_misfit_and_noise() -> None:
    assert misfit(AT, 4.0 + 2.0 * AT) == pytest.approx(0.0, abs=1e-3)
    assert misfit(AT, np.where(AT % 2 == 0, 1.0, -1.0)) == pytest.approx(240.0, rel=0.01)
    assert misfit(np.zeros(4), np.array([0.0, 0.0, 2.0, 2.0])) == pytest.approx(4.0)
    deviations = np.random.default_rng(2).normal(0, 5.0, 5000)
    deviations[:50] = 1e9  # jumps do not count
    assert noise(deviations) == pytest.approx(5.0, rel=0.05)


def test_the_error_of_a_few_levels_is_that_worked_out_by_hand() -> None:
    line = fit(np.arange(6.0), np.array([1.0, 1.0, -1.0, -1.0, 1.0, 1.0]), 24)
    assert line.rate == 0
    # Residuals times places, in thirds: -5, -3, 2, -2, 3, 5. Their squares add up to 76, products with the
    # next to 14 and with the next but one to -8, which count two thirds and one third, twice.
    variance = (76 + 2 * (2 / 3) * 14 - 2 * (1 / 3) * 8) / 9
    assert line.error == pytest.approx(1.2 * np.sqrt(variance * 6 / 4) / 17.5)


def test_rises_from_one_to_the_next_that_differ_make_quarters_differ() -> None:
    # Each quarter of the 16 rises has four: 1 and 3 by turns differ by 2, and half of 2 x 2 is 2.
    values = np.concatenate(([0.0], np.cumsum(np.tile([1.0, 3.0], 8))))
    assert fit(np.arange(17.0), values, 24).difference_of_quarters() == pytest.approx(np.sqrt((2 + 2) / 4))
    of_few = fit(np.arange(7.0), values[:7], 24)  # a quarter of one rise says nothing
    assert of_few.difference_of_quarters() < np.sqrt((2 + 2) / 1)


def test_a_level_of_a_window_is_the_reading_at_its_quantile() -> None:
    values = np.tile([5.0, 4.0, 3.0, 2.0, 1.0, 0.0], 8)
    for quantile, chosen in ((0.0, 0.0), (0.2, 1.0), (0.39, 1.0), (0.4, 2.0), (1.0, 5.0)):
        assert set(levels(np.arange(48.0), values, 8, quantile)[1]) == {chosen}
