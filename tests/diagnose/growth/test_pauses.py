"""Whether a program makes up for pauses is seen by over which time it has its usual rate."""

from __future__ import annotations

import numpy as np
import pytest

from memtriage.diagnose.growth.pauses import Pauses
from memtriage.diagnose.growth.track import Points

MIB = 1 << 20


def pauses_of(*pauses: tuple[float, float]) -> Pauses:
    added = Pauses()
    for place, seconds in pauses:
        added.add(place, seconds)
    return added


def points_of(pauses: Pauses, *, makes_up: bool, noise: float = 0.0, slow: bool = False) -> Points:
    at = np.arange(0, 20, 0.1)
    time = np.array([pauses.included(place) for place in at]) if makes_up else at
    values = MIB * (time + noise * np.random.default_rng(0).normal(size=len(at)))
    if slow:  # does at most twice as much as usual
        values = np.minimum.accumulate(values - 2 * MIB * at) + 2 * MIB * at
    return Points(at, values, values)


THREE = pauses_of((2.0, 1.0), (3.0, 2.0), (7.0, 1.5))


def test_a_place_is_moved_by_the_pauses_before_it() -> None:
    assert [THREE.included(place) for place in (1.0, 2.0, 2.5, 3.5, 9.0)] == [1.0, 2.0, 3.5, 6.5, 13.5]


@pytest.mark.parametrize("makes_up", [True, False])
def test_the_usual_rate_is_that_over_the_time_that_the_program_keeps(makes_up: bool) -> None:
    assert THREE.made_up_for(points_of(THREE, makes_up=makes_up, noise=0.1)) is makes_up


def test_what_is_freed_at_the_end_does_not_count() -> None:
    points = points_of(THREE, makes_up=True)
    points.floors[-2:] = 0
    assert THREE.made_up_for(points)


def test_a_program_may_take_a_while_to_catch_up() -> None:
    assert THREE.made_up_for(points_of(THREE, makes_up=True, slow=True))


@pytest.mark.parametrize(
    ("pauses", "points"),
    [
        pytest.param(pauses_of(), points_of(THREE, makes_up=True), id="no pauses"),
        pytest.param(
            pauses_of((5.0, 0.1)), points_of(pauses_of((5.0, 0.1)), makes_up=True), id="short pauses"
        ),
        pytest.param(THREE, points_of(pauses_of(), makes_up=False).steeper(-2 * MIB), id="no growth"),
        pytest.param(THREE, points_of(THREE, makes_up=True).since(19.5), id="few readings"),
    ],
)
def test_what_is_not_sure_counts_as_lost(pauses: Pauses, points: Points) -> None:
    assert not pauses.made_up_for(points)


@pytest.mark.parametrize(
    ("readings", "seconds", "caught_up", "made_up"),
    [
        pytest.param(20, 1.0, 1.0, True, id="a twentieth of the time are pauses"),
        pytest.param(20, 0.99, 0.99, False, id="less is no difference"),
        pytest.param(9, 1.0, 1.0, True, id="nine readings"),
        pytest.param(8, 1.0, 1.0, False, id="eight readings"),
        pytest.param(20, 1.0, 0.7, True, id="most is made up for"),
        pytest.param(20, 1.0, 0.6, False, id="much is lost"),  # more than 20 of 58 parts
    ],
)
def test_pauses_count_from_their_thresholds_on(
    readings: int, seconds: float, caught_up: float, made_up: bool
) -> None:
    """A program that grows by 1 per second catches up at once after a pause at its first reading."""
    at = np.arange(readings, dtype=float)
    values = at + caught_up * (at > 0)
    assert pauses_of((0.0, seconds)).made_up_for(Points(at, values, values)) is made_up
