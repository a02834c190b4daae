"""The plan of censuses: few while nothing grows, soon and in doubling distances under suspicion."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.census_plan import PLANS, CensusPolicy, affordable, next_census
from memtriage.diagnose.growth.proof import POLICY
from memtriage.diagnose.growth.trend import GrowthEstimate

STEPS = PLANS["step"]
FLAT = GrowthEstimate("flat")


def growing(onset: float = 4, period: float | None = None) -> GrowthEstimate:
    return GrowthEstimate("growing", 100, 90, 110, onset, period)


def times(found: GrowthEstimate, until: int, since: int = 0, proven: bool = False) -> list[float]:
    """Censuses of a run that looks at the plan at every step; nothing grows before `since`."""
    taken: list[float] = []
    for step in range(1, until + 1):
        if step >= next_census(taken, found if step >= since else FLAT, proven):
            taken.append(step)
    return taken


def test_a_run_in_which_nothing_grows_has_few() -> None:
    assert times(FLAT, 1_000) == [3, 6, 24, 96, 384]
    assert len(times(FLAT, 300_000)) == 9


@given(st.integers(6, 3_000))
def test_their_number_is_bounded_by_the_logarithm_of_a_run(steps: int) -> None:
    doublings = math.log2(steps / 6) + 1e-9
    assert len(times(FLAT, steps)) <= 2 + doublings / 2
    assert len(times(growing(), steps, proven=True)) <= 2 + doublings


@pytest.mark.parametrize("onset", [12, 100, 2_000])
def test_a_suspicion_is_settled_in_as_long_a_time_again(onset: int) -> None:
    taken = [step for step in times(growing(onset), 2 * onset + 12, since=onset) if step >= onset]
    assert len(taken) >= 4
    gaps = [b - a for a, b in pairwise(taken)]
    assert gaps[0] <= 2 * STEPS.gap and all(b <= 2 * a for a, b in pairwise(gaps))


def test_first_census_over_time_waits_for_own_work() -> None:
    plan = PLANS["second"]
    assert next_census([], FLAT, False, plan, begun=20.0) == 20.0 + plan.unasked
    assert next_census([], growing(), False, plan, begun=20.0) == 20.0 + plan.first < 20.0 + plan.unasked
    assert next_census([20.5, 21.0], FLAT, False, plan, begun=20.0) == pytest.approx(24.0)


def test_a_false_alarm_puts_the_next_census_off_by_little() -> None:
    assert next_census([3, 6, 100], growing(onset=4), False) <= 110


def test_distances_under_suspicion_are_a_third_of_the_time_since_its_onset_at_most() -> None:
    taken = [3, 6, 24, 96, 100, 104, 108, 116]
    assert next_census(taken, growing(onset=100), False) == pytest.approx(116 + 16 / 3)
    assert next_census([10, 20, 40, 80, 160], growing(onset=10), False) == 160 + 2 * 2**4


def test_what_is_periodic_is_compared_whole_periods_apart() -> None:
    taken = [time for time in times(growing(onset=180, period=60), 900, since=200) if time >= 200]
    assert len(taken) >= 4
    assert all((b - a) % 60 == 0 for a, b in pairwise(taken))


def test_a_proven_leak_that_its_counter_shows_is_looked_at_as_seldom_as_what_does_not_grow() -> None:
    assert next_census([3, 12, 14, 20], growing(), True) == 80 == next_census([3, 12, 14, 20], FLAT, False)


def test_unseen_proven_leak_gets_a_census_before_it_ages() -> None:
    due = next_census([10, 20, 40, 80, 160], growing(10), True, shown=False)
    assert due == 190 < 160 + POLICY.ages * 150
    assert next_census([10, 20, 40, 80, 160], growing(10), True) == 640


@given(
    st.lists(st.floats(0, 1e6), max_size=12).map(sorted),
    st.sampled_from([FLAT, growing(), growing(onset=500), growing(period=7), GrowthEstimate("undecided")]),
    st.booleans(),
    st.sampled_from([PLANS["step"], PLANS["second"]]),
)
def test_the_next_census_comes_after_the_last(
    taken: list[float], found: GrowthEstimate, proven: bool, policy: CensusPolicy
) -> None:
    due = next_census(taken, found, proven, policy)
    assert due >= (taken[-1] + policy.gap if len(taken) > 1 else policy.first)


# --- what they may cost -------------------------------------------------------------------------------------


def test_censuses_cost_a_second_and_a_fiftieth_of_the_time() -> None:
    taken = [3.0, 6.0, 24.0, 96.0]
    assert affordable(taken, None, 0.8, 0)
    assert not affordable(taken, None, 0.81, 0)
    assert affordable(taken, None, 2.4, 100)
    assert not affordable(taken, None, 2.5, 100)


def test_what_surely_grows_is_worth_more() -> None:
    taken = [3.0, 6.0, 24.0, 96.0]
    assert affordable(taken, None, 2.0, 0, grows=True)
    assert not affordable(taken, None, 2.1, 0, grows=True)
    assert affordable(taken, None, 6.0, 100, grows=True)
    assert not affordable(taken, None, 6.1, 100, grows=True)


def test_the_first_are_taken_at_any_cost() -> None:
    assert affordable([3.0], None, 60, 70)
    assert not affordable([3.0, 6.0], None, 60, 70)
    assert not affordable([0.5], None, 60, 70, PLANS["second"])


def test_a_suspicion_is_settled_at_any_cost_and_then_no_more() -> None:
    taken = [3.0, 6.0, 24.0]
    for step in range(100, 106):
        assert affordable(taken, 99.0, 60, 70)
        taken.append(float(step))
    assert not affordable(taken, 99.0, 60, 70)


@given(st.floats(0, 30), st.floats(0.01, 2), st.integers(20, 600), st.sampled_from([FLAT, growing()]))
def test_censuses_stay_within_their_budget(
    census_s: float, step_s: float, steps: int, found: GrowthEstimate
) -> None:
    taken: list[float] = []
    onset = found.onset
    for step in range(1, steps + 1):
        due = step >= next_census(taken, found, False)
        if due and affordable(taken, onset, census_s * len(taken), step * step_s):
            taken.append(step)
    free = STEPS.always + (STEPS.to_prove if onset is not None else 0)
    budget = STEPS.free_s + STEPS.cost * steps * step_s
    assert census_s * max(0, len(taken) - free) <= budget
