"""A track: any number of readings in bounded memory, with means and floors as they were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.track import Track


def track(values: list[int], warm_up: int = 0) -> Track:
    made = Track(warm_up)
    for step, value in enumerate(values, 1):
        made.add(step, value)
    return made


def test_few_readings_are_kept_as_they_are() -> None:
    points = track([7, 5, 9]).points()
    assert points.at.tolist() == [1, 2, 3]
    assert points.means.tolist() == points.floors.tolist() == [7, 5, 9]


def test_the_warm_up_is_left_out_and_the_last_reading_is_known() -> None:
    made = track([100, 200, 3, 4], warm_up=2)
    assert made.points().means.tolist() == [3, 4]
    assert (made.readings, made.last) == (4, (4, 4))


@pytest.mark.parametrize("length", [511, 512, 513, 1024, 100_000])
def test_memory_stays_bounded_and_the_whole_run_is_covered(length: int) -> None:
    points = track(list(range(length))).points()
    assert 256 <= len(points.at) <= 512
    block = length / len(points.at)
    assert points.at[0] <= 1 + block
    assert points.at[-1] >= length - block


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=3000))
def test_floors_are_minima_and_means_within_range(values: list[int]) -> None:
    points = track(values).points()
    assert points.floors.min() >= min(values)
    assert (points.floors <= points.means * (1 + 1e-12)).all()
    assert points.means.max() <= max(values)
    assert (points.at[1:] > points.at[:-1]).all()


@given(st.integers(512, 4000), st.integers(0, 1 << 20), st.integers(0, 1 << 40))
def test_a_line_stays_a_line(length: int, rate: int, base: int) -> None:
    points = track([base + rate * step for step in range(1, length + 1)]).points()
    assert points.means == pytest.approx(base + rate * points.at)


def test_points_with_growth_added_are_steeper_by_it() -> None:
    points = track([7, 5, 9]).points().since(2)
    steeper = points.plus(10.0 * points.at)
    assert steeper.at.tolist() == [2, 3]
    assert steeper.means.tolist() == steeper.floors.tolist() == [25, 39]


@pytest.mark.parametrize(("length", "last"), [(512 + 1, 511.5), (1024 + 2, 1022.5), (1024 + 3, 1026.0)])
def test_a_block_counts_from_the_half_of_its_width(length: int, last: float) -> None:
    """From 512 readings on a block has two, from 1024 on four."""
    assert track(list(range(length))).points().at[-1] == last


def test_since() -> None:
    assert track([1, 2, 3, 4]).points().since(3).means.tolist() == [3, 4]
    assert track([1]).points().since(2).span == 0
    assert track([]).points().span == 0


def test_a_second_reading_at_one_position_is_left_out() -> None:
    track = Track()
    for position, value in ((1, 10), (2, 20), (2, 30), (3, 40)):
        track.add(position, value)
    assert (track.points().at.tolist(), track.points().means.tolist()) == ([1, 2, 3], [10, 20, 40])
    assert (track.readings, track.last) == (3, (3, 40))
