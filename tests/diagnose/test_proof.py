"""Proof: three intervals by identity, and no counter that contradicts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.proof import prove
from memtriage.diagnose.trend import GrowthEstimate

MIB = 1024**2
FLAT = GrowthEstimate("flat")


def grows(rate: float) -> GrowthEstimate:
    return GrowthEstimate("growing", rate, 0.9 * rate, 1.1 * rate, 0.0)


def steadily(*at: float, rate: int = MIB) -> list[tuple[float, int]]:
    return [(position, round(5 * MIB + rate * position)) for position in at]


def test_three_intervals_prove_a_leak() -> None:
    proof = prove(steadily(3, 12, 14, 20), [(grows(MIB), None)])
    assert (proof.certainty, proof.rate, proof.intervals, proof.reason) == ("proven", MIB, 3, None)


def test_two_intervals_are_a_suspicion_that_says_so() -> None:
    proof = prove(steadily(3, 12, 14), [(grows(MIB), None)])
    assert proof.certainty == "suspected"
    assert proof.reason == "it grew over 2 of 3 intervals"


def test_one_census_or_none_proves_nothing() -> None:
    assert prove([], []).certainty is None
    assert prove(steadily(3), []).certainty is None


def test_python_objects_are_proven_without_a_counter() -> None:
    assert prove(steadily(3, 12, 14, 20), []).certainty == "proven"


def test_a_counter_that_would_have_seen_it_contradicts() -> None:
    sizes = steadily(3, 12, 14, 20)
    assert prove(sizes, [(FLAT, MIB / 4)]).certainty is None
    assert prove(sizes, [(grows(MIB / 4), None)]).certainty is None
    assert prove(sizes, [(grows(MIB), None), (FLAT, MIB / 4)]).certainty is None


def test_a_counter_that_could_not_have_seen_it_does_not_contradict() -> None:
    sizes = steadily(3, 12, 14, 20)
    assert prove(sizes, [(FLAT, 2.0 * MIB)]).certainty == "proven"
    assert prove(sizes, [(FLAT, None)]).certainty == "proven"
    assert prove(sizes, [(GrowthEstimate("too_short"), None)]).certainty == "proven"
    assert prove(sizes, [(GrowthEstimate("undecided"), None)]).certainty == "proven"


def test_what_stopped_is_no_leak() -> None:
    filled = [(3, 0), (12, 9 * MIB), (24, 20 * MIB), (48, 20 * MIB)]
    assert prove(filled, []).certainty is None


def test_what_began_late_counts_from_its_onset() -> None:
    sizes = [(3, MIB), (12, MIB), (192, MIB), (200, 2 * MIB), (210, 3 * MIB), (230, 5 * MIB)]
    proof = prove(sizes, [])
    assert (proof.certainty, proof.intervals) == ("proven", 3)


def test_what_slows_down_stays_a_suspicion() -> None:
    assert prove([(0, 0), (10, 80), (20, 120), (30, 140)], []).certainty == "suspected"


def test_intervals_of_periodic_growth_are_whole_periods() -> None:
    within = [(float(at), at // 60 * MIB) for at in (130, 150, 170, 179, 185)]
    assert prove(within, [], period=60).certainty != "proven"
    apart = [(float(at), at // 60 * MIB) for at in (130, 190, 250, 370)]
    proof = prove(apart, [], period=60)
    assert (proof.certainty, proof.intervals) == ("proven", 3)


@given(st.lists(st.integers(1, 10_000), min_size=4, max_size=9, unique=True), st.integers(1, 1 << 40))
def test_steady_growth_is_always_proven_with_its_rate(at: list[int], rate: int) -> None:
    proof = prove([(position, rate * position) for position in sorted(at)], [(grows(rate), None)])
    assert proof.certainty == "proven"
    assert abs(proof.rate - rate) <= 1e-6 * rate


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9))
def test_what_ends_no_larger_than_before_is_never_proven(sizes: list[int]) -> None:
    ends = [*sizes, sizes[-1]]
    assert prove(list(enumerate(ends)), []).certainty is None
