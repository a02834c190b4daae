"""Jumps and releases are set apart from a trend; changes say from where the rest is judged alone."""

from __future__ import annotations

import numpy as np
import pytest

from memtriage.diagnose.growth.jumps import bend_to_flat, changes, without_jumps, without_releases
from memtriage.diagnose.growth.track import Floats, Points
from support.expected import assert_as_kept

AT: Floats = np.arange(1, 241, dtype=np.float64)
STEADY = 10.0 * AT


def points(values: Floats) -> Points:
    return Points(AT, values, values - 1.0)


def test_one_or_two_jumps_are_removed_where_they_happened() -> None:
    one, (jump,) = without_jumps(points(STEADY + 5_000.0 * (AT >= 100)))
    assert jump == (100.0, pytest.approx(5_000.0))
    assert one.means == pytest.approx(STEADY)
    assert one.floors == pytest.approx(STEADY - 1.0)
    two, jumps = without_jumps(points(STEADY + 5_000.0 * (AT >= 60) + 6_000.0 * (AT >= 180)))
    assert [position for position, _ in jumps] == [60.0, 180.0]
    assert two.means == pytest.approx(STEADY)


def test_three_jumps_are_growth_and_stay() -> None:
    values = 5_000.0 * ((AT >= 60).astype(float) + (AT >= 120) + (AT >= 180))
    same, jumps = without_jumps(points(values))
    assert jumps == ()
    assert same.means == pytest.approx(values)


@pytest.mark.parametrize(("share", "jumps"), [(0.2, 0), (0.3, 1)])
def test_a_jump_is_a_large_part_of_the_whole_rise(share: float, jumps: int) -> None:
    rise = STEADY[-1] - STEADY[0]
    size = share / (1 - share) * rise
    assert len(without_jumps(points(STEADY + size * (AT >= 125)))[1]) == jumps


def test_noise_is_no_jump() -> None:
    values = np.random.default_rng(4).normal(0, 100.0, len(AT))
    assert without_jumps(points(values))[1] == ()


def test_a_release_that_is_small_beside_the_growth_is_put_back() -> None:
    put_back = without_releases(points(STEADY - 300.0 * (AT >= 125)))
    assert put_back.means == pytest.approx(STEADY, abs=1.0)
    assert put_back.floors == pytest.approx(STEADY - 1.0, abs=1.0)
    two = without_releases(points(STEADY - 200.0 * (AT >= 80) - 150.0 * (AT >= 160)))
    assert two.means == pytest.approx(STEADY, abs=1.0)


@pytest.mark.parametrize(("part", "kept"), [(0.3, False), (0.5, True)])
def test_a_list_that_is_emptied_is_no_release(part: float, kept: bool) -> None:
    values = STEADY - part * 1_200.0 * (AT >= 120)
    left = without_releases(points(values)).means[-1] == pytest.approx(values[-1])
    assert bool(left) == kept


def test_a_fall_of_what_does_not_grow_is_no_release() -> None:
    values = np.where(AT < 120, 1_000.0, 400.0)
    assert without_releases(points(values)).means == pytest.approx(values)


def test_an_onset_a_fall_and_the_middle_begin_new_stretches() -> None:
    middle = 1 + (240 - 1) / 2
    onset = changes(points(np.maximum(0.0, 50.0 * (AT - 80))))
    assert onset == [pytest.approx(80, abs=6), middle]
    fall = changes(points(STEADY - 1_500.0 * (AT >= 50)))
    assert pytest.approx(51, abs=6) in fall
    assert changes(points(STEADY)) == [middle]


def test_an_onset_near_the_end_leaves_too_little_to_judge() -> None:
    assert changes(points(np.maximum(0.0, 50.0 * (AT - 215)))) == [120.5]


def test_a_fall_in_the_second_half_begins_no_stretch() -> None:
    late = STEADY - 2_000.0 * (AT >= 190)
    assert not [position for position in changes(points(late)) if position > 150]


def test_growth_that_ended_bends_to_flat() -> None:
    assert bend_to_flat(points(10.0 * np.minimum(AT, 150))) == pytest.approx(150, abs=6)
    assert bend_to_flat(points(STEADY)) is None


def test_growth_that_pauses_is_no_release() -> None:
    values = STEADY - 10.0 * np.clip(AT - 120, 0, 11)
    assert without_releases(points(values)).means == pytest.approx(values)


@pytest.mark.parametrize(("part", "stretches"), [(0.29, 1), (0.31, 2)])
def test_a_fall_of_three_tenths_of_the_swing_begins_a_stretch(part: float, stretches: int) -> None:
    """The series stays below its highest reading, so that its swing is 1 before and after the fall."""
    values = np.where(AT < 60, 1.0, 1.0 - part) * 1e6
    values[:3] = 0.0
    assert len(changes(points(values))) == stretches


def course(seed: int) -> Points:
    """Growth with some jumps, releases, an onset or an end, and noise; not each position was read."""
    chance = np.random.default_rng(seed)
    at = AT[np.sort(chance.choice(240, int(chance.choice([60, 150, 240])), replace=False))]
    values = 10.0 * np.clip(at, chance.choice([0, 0, 120]), chance.choice([150, 220, 240, 240]))
    for _ in range(seed % 4):
        values = values + chance.choice([-400.0, 900.0, 2500.0]) * (at >= chance.integers(20, 230))
    means = values + chance.normal(0, chance.choice([0.0, 3.0, 30.0]), len(at))
    return Points(at, means, means - 1.0)


def test_all_of_what_is_seen_in_many_courses() -> None:
    rows = []
    for seed in range(120):
        given = course(seed)
        smooth, jumps = without_jumps(given)
        put_back = without_releases(given)
        bend = bend_to_flat(given)
        rows.append([
            [f"{position:.4g}: {nbytes:.4g}" for position, nbytes in jumps],
            f"{smooth.means[-1]:.4g}", f"{put_back.means[-1]:.4g}",
            [f"{position:.4g}" for position in changes(given)], None if bend is None else f"{bend:.4g}",
        ])  # fmt: skip
    assert_as_kept("jumps", rows)
