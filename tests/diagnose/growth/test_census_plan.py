"""The plan of censuses: few while nothing grows, soon and in doubling distances under suspicion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.attribution import attribute
from memtriage.diagnose.growth.census_plan import (
    COST,
    FIRST,
    FREE_S,
    GAP,
    TO_PROVE,
    WIDENS,
    Suspicion,
    affordable,
    next_census,
    suspicion_of,
)
from memtriage.diagnose.growth.estimate import POLICY as ESTIMATE
from memtriage.diagnose.growth.evidence import Comparison
from memtriage.model.evidence import CensusSeen
from memtriage.model.position import Scale
from support.observed import BASE, Found, data, held, observed, position

KIB, MIB = 1024, 1024**2
NOTHING = Suspicion()


def growing(since: float = 4, **more: Any) -> Suspicion:
    return Suspicion(open=True, grows=True, since=since, **more)


def proven(since: float = 4, *, unseen: bool = False) -> Suspicion:
    return Suspicion(grows=True, unseen=unseen, since=since)


def taken(positions: Sequence[float], scale: Scale = "step", begins: float = 0.0) -> Comparison:
    """A comparison with censuses at these positions."""
    comparison = Comparison(scale, begins=begins)
    comparison.censuses = [CensusSeen(position=position(at, scale), work_s=at) for at in positions]
    return comparison


def times(suspicion: Suspicion, until: int, since: int = 0) -> list[float]:
    """Censuses of a run that looks at the plan at every step; nothing grows before `since`."""
    comparison = taken([])
    for step in range(1, until + 1):
        if step >= next_census(comparison, suspicion if step >= since else NOTHING):
            comparison.censuses += taken([step]).censuses
    return comparison.positions


# --- when they are taken ------------------------------------------------------------------------------------


def test_a_run_in_which_nothing_grows_has_few() -> None:
    assert times(NOTHING, 1_000) == [3, 12, 48, 192, 768]
    assert len(times(NOTHING, 300_000)) == 9


@given(st.integers(3, 3_000), st.sampled_from([NOTHING, proven()]))
def test_their_number_is_bounded_by_the_logarithm_of_a_run(steps: int, suspicion: Suspicion) -> None:
    assert len(times(suspicion, steps)) <= 1 + math.log(steps / FIRST["step"], WIDENS) + 1e-9


@pytest.mark.parametrize("onset", [12, 100, 2_000])
def test_a_suspicion_is_settled_in_as_long_a_time_again(onset: int) -> None:
    after = [step for step in times(growing(onset), 2 * onset + 12, since=onset) if step >= onset]
    assert len(after) >= 4
    gaps = [b - a for a, b in pairwise(after)]
    assert gaps[0] <= 2 * GAP["step"] and all(b <= 2 * a for a, b in pairwise(gaps))


def test_first_census_over_time_waits_for_own_work() -> None:
    begun = taken([], "second", begins=20.0)
    assert next_census(begun, NOTHING) == 20.0 + FIRST["second"]
    assert next_census(begun, growing(20.0)) == 20.0 + GAP["second"] < 20.0 + FIRST["second"]
    assert next_census(taken([20.5, 21.0], "second", begins=20.0), NOTHING) == pytest.approx(24.0)


def test_a_false_alarm_puts_the_next_census_off_by_little() -> None:
    assert next_census(taken([3, 6, 100]), growing(since=4)) <= 110


def test_distances_under_suspicion_are_a_third_of_the_time_since_its_onset_at_most() -> None:
    late = taken([3, 6, 24, 96, 100, 104, 108, 116])
    assert next_census(late, growing(since=100)) == pytest.approx(116 + 16 / 3)
    assert next_census(taken([10, 20, 40, 80, 160]), growing(since=10)) == 160 + 2 * 2**4


def test_what_is_periodic_is_compared_whole_periods_apart() -> None:
    after = [at for at in times(growing(180, period=60), 900, since=200) if at >= 200]
    assert len(after) >= 4
    assert all((b - a) % 60 == 0 for a, b in pairwise(after))


def test_a_proven_leak_that_its_counter_shows_is_looked_at_as_seldom_as_what_does_not_grow() -> None:
    comparison = taken([3, 12, 14, 20])
    assert next_census(comparison, proven()) == 80 == next_census(comparison, NOTHING)


def test_unseen_proven_leak_gets_a_census_before_it_ages() -> None:
    comparison = taken([10, 20, 40, 80, 160])
    assert next_census(comparison, proven(10, unseen=True)) == 190 < 160 + ESTIMATE.share * 150
    assert next_census(comparison, proven(10)) == 640


@given(
    st.lists(st.integers(0, 1_000_000), max_size=12).map(sorted),
    st.sampled_from([NOTHING, growing(), growing(500), growing(period=7), proven(), proven(unseen=True)]),
    st.sampled_from(["step", "second"]),
)
def test_the_next_census_comes_after_the_last(
    positions: list[int], suspicion: Suspicion, scale: Scale
) -> None:
    due = next_census(taken(positions, scale), suspicion)
    assert due >= (positions[-1] + GAP[scale] if positions else GAP[scale])


# --- what they may cost -------------------------------------------------------------------------------------


def test_censuses_cost_a_second_and_a_fiftieth_of_the_time() -> None:
    comparison = taken([3, 6, 24, 96])
    assert affordable(comparison, NOTHING, 0.8, 0)
    assert not affordable(comparison, NOTHING, 0.81, 0)
    assert affordable(comparison, NOTHING, 2.4, 100)
    assert not affordable(comparison, NOTHING, 2.5, 100)


def test_only_the_first_is_taken_at_any_cost() -> None:
    assert affordable(taken([]), NOTHING, 0, 0)
    assert affordable(taken([3]), NOTHING, FREE_S / 2, 0)
    assert not affordable(taken([3]), NOTHING, 60, 70)


def test_a_suspicion_is_settled_at_any_cost_and_then_seldom() -> None:
    comparison = taken([3, 6, 24])
    for step in range(100, 104):
        assert affordable(comparison, growing(99), 60, 70)
        comparison.censuses += taken([step]).censuses
    for step, much_later in [(4 * 103 - 1, False), (4 * 103, True)]:
        comparison.now = step
        assert affordable(comparison, growing(99), 60, 70) is much_later


def test_what_is_proven_is_confirmed_once_later_at_any_cost() -> None:
    comparison = taken([3, 6, 9, 12])
    for step, confirms in [(47, False), (48, True)]:
        comparison.now = step
        assert affordable(comparison, proven(3), 60, 70) is confirms
    comparison.censuses += taken([48]).censuses
    comparison.now = 4 * 48
    assert not affordable(comparison, proven(3), 60, 70)


@given(st.floats(0, 30), st.floats(0.01, 2), st.integers(20, 600), st.sampled_from([NOTHING, growing()]))
def test_censuses_stay_within_their_budget(
    census_s: float, step_s: float, steps: int, suspicion: Suspicion
) -> None:
    comparison = taken([])
    for step in range(1, steps + 1):
        spent_s = census_s * len(comparison.censuses)
        due = step >= next_census(comparison, suspicion)
        if due and affordable(comparison, suspicion, spent_s, step * step_s):
            comparison.censuses += taken([step]).censuses
    free = 1 + (TO_PROVE if suspicion.open else 0)
    budget = FREE_S + COST * steps * step_s
    assert census_s * max(0, len(comparison.censuses) - free) <= budget + 1e-6


# --- what is suspect ----------------------------------------------------------------------------------------


def rising(rate: float, steps: int = 60) -> list[float]:
    return [BASE + rate * at for at in range(1, steps + 1)]


def keeping(at: int) -> Found:
    return [held(MIB * at, at)]


def suspicion(
    counters: dict[str, list[float]], found: Any = lambda at: (), censuses: Sequence[int] = ()
) -> Suspicion:
    comparison = observed(counters, found, censuses).main
    return suspicion_of(comparison, attribute(comparison))


def test_a_counter_that_rises_is_suspect_until_holders_explain_most_of_it() -> None:
    assert suspicion({"cpu": rising(0)}) == NOTHING
    unexplained = suspicion({"cpu": rising(MIB)})
    assert (unexplained.open, unexplained.grows) == (True, True)
    explained = suspicion({"cpu": rising(MIB)}, keeping, (20, 40, 60))
    assert (explained.open, explained.grows, explained.unseen) == (False, True, False)
    in_part = suspicion({"cpu": rising(3 * MIB)}, keeping, (20, 40, 60))
    assert (in_part.open, in_part.grows) == (True, True)


def test_what_only_censuses_show_is_suspect_until_they_prove_it() -> None:
    counters = {"cuda:1": rising(0)}
    few = suspicion(counters, keeping, (20, 40))
    assert (few.open, few.since) == (True, 20)
    enough = suspicion(counters, keeping, (15, 30, 45, 60))
    assert (enough.open, enough.grows, enough.unseen) == (False, True, True)


def test_growth_of_the_resident_set_is_suspect_unless_malloc_or_data_explains_it() -> None:
    assert suspicion({"cpu": rising(0), "host": rising(MIB)}).open
    both = {"cpu": rising(MIB), "host": rising(MIB)}
    assert not suspicion(both, keeping, (20, 40, 60)).open

    def texts(at: int) -> Found:
        return [data(at, MIB)]

    assert not suspicion({"host": rising(MIB)}, texts, (20, 40, 60)).open
    assert not suspicion({"code": rising(MIB)}).open  # it only confirms others


@pytest.mark.parametrize(
    ("censuses", "unlisted", "open_"),
    [
        pytest.param((20, 40), 1.0, True, id="it grows by memory that no census lists"),
        pytest.param((20, 40), 0.1, False, id="by pages of what they list"),
        pytest.param((20,), 1.0, True, id="one more may show it"),
        pytest.param((20, 59), 1.0, False, id="it has hardly grown since the last"),
        pytest.param((), 0.0, True, id="no census yet"),
    ],
)
@pytest.mark.parametrize("pages", ["host", "shared"])
def test_growth_of_pages_is_suspect_while_censuses_may_explain_it(
    censuses: Sequence[int], unlisted: float, open_: bool, pages: str
) -> None:
    evidence = observed({"cpu": rising(0), pages: rising(MIB)})
    for at in censuses:
        least = round(unlisted * at * MIB)
        evidence.add(CensusSeen(position=position(at, "step"), other_memory={pages: (least, least + MIB)}))
    assert suspicion_of(evidence.main, attribute(evidence.main)).open == open_


def test_suspicions_know_their_onset_and_their_period() -> None:
    late = suspicion({"cpu": [BASE + MIB * max(0, at - 60) for at in range(1, 121)]})
    assert late.since == pytest.approx(60, abs=5)
    stairs = suspicion({"cpu": [BASE + MIB * (at // 10) for at in range(1, 121)]})
    assert (stairs.period, suspicion({"cpu": rising(MIB)}).period) == (10, None)


def test_censuses_that_name_nothing_are_counted_where_a_counter_surely_grows() -> None:
    assert suspicion({"cpu": rising(MIB)}, censuses=(20, 40, 60)).named_nothing == 3
    assert suspicion({"cpu": rising(0)}, censuses=(20, 40, 60)).named_nothing == 0
    assert suspicion({"cpu": rising(3 * MIB)}, keeping, (20, 40, 60)).named_nothing == 0
