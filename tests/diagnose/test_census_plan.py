"""The plan of censuses: few while nothing grows, soon and in doubling distances under suspicion."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.census_plan import SECONDS, STEPS, CensusPolicy, affordable, next_census
from memtriage.diagnose.trend import GrowthEstimate

FLAT = GrowthEstimate("flat")


def growing(onset: float = 4, period: float | None = None) -> GrowthEstimate:
    return GrowthEstimate("growing", 100, 90, 110, onset, period)


def times(found: GrowthEstimate, until: float, first: float = STEPS.first) -> list[float]:
    """Censuses of a run that looks at the plan at every step."""
    taken: list[float] = []
    for step in range(1, round(until) + 1):
        if step >= (next_census(taken, found, False) if taken else first):
            taken.append(step)
    return taken


def test_a_run_in_which_nothing_grows_has_few() -> None:
    assert times(FLAT, 1_000) == [3, 12, 48, 192, 768]
    assert len(times(FLAT, 300_000)) == 9


@pytest.mark.parametrize("first", [12, 100, 5_000])
def test_a_suspicion_is_settled_soon(first: int) -> None:
    taken = times(growing(), 2 * first, first)
    assert len(taken) >= 4  # three intervals in as long a time again
    gaps = [b - a for a, b in pairwise(taken)]
    assert gaps == sorted(gaps)


def test_a_false_alarm_puts_the_next_census_off_by_little() -> None:
    assert next_census([3, 100], growing(onset=4), False) <= 110


def test_what_is_periodic_is_compared_whole_periods_apart() -> None:
    taken = times(growing(period=60), 600, first=200)
    assert len(taken) >= 4
    assert all((b - a) % 60 == 0 for a, b in pairwise(taken))


def test_a_proven_leak_is_looked_at_when_the_run_is_twice_as_long() -> None:
    assert next_census([3, 12, 14, 20], growing(), True) == 40


@given(
    st.lists(st.floats(0, 1e6), max_size=12).map(sorted),
    st.sampled_from([FLAT, growing(), growing(onset=500), growing(period=7), GrowthEstimate("undecided")]),
    st.booleans(),
    st.sampled_from([STEPS, SECONDS]),
)
def test_the_next_census_comes_after_the_last(
    taken: list[float], found: GrowthEstimate, proven: bool, policy: CensusPolicy
) -> None:
    due = next_census(taken, found, proven, policy)
    assert due >= (taken[-1] + policy.gap if taken else policy.first)


def test_censuses_cost_a_second_and_a_fiftieth_of_the_time() -> None:
    assert affordable(0, 0, 0)
    assert affordable(0.6, 0.3, 0)
    assert not affordable(0.6, 0.5, 0)
    assert affordable(2.5, 0.5, 100)
    assert not affordable(2.6, 0.5, 100)
