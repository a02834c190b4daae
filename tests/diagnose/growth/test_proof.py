"""Proof: three intervals of one holder, and no counter that contradicts."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.growth.proof import BY_TIME, POLICY, Proof, ProofPolicy, prove
from support.expected import assert_as_kept

MIB = 1024**2


def steadily(*at: float, rate: float = MIB) -> list[tuple[float, float]]:
    return [(position, 5 * MIB + rate * position) for position in at]


def test_a_suspicion_of_what_was_proven_keeps_its_rate() -> None:
    proven = Proof("proven", MIB, 3, 8.0, stopped=20.0)
    assert proven.suspected("why") == Proof("suspected", MIB, 3, 8.0, "why", stopped=20.0)


def test_three_intervals_prove_a_leak() -> None:
    proof = prove(steadily(3, 12, 14, 20))
    assert (proof.certainty, proof.rate, proof.intervals, proof.since) == ("proven", MIB, 3, 3)
    assert proof.reason is None


@pytest.mark.parametrize(("at", "grew"), [((3, 12), 1), ((3, 12, 14), 2)])
def test_fewer_are_a_suspicion_that_says_what_is_missing(at: tuple[float, ...], grew: int) -> None:
    proof = prove(steadily(*at))
    assert (proof.certainty, proof.intervals) == ("suspected", grew)
    assert proof.reason == f"it grew over {grew} of 3 intervals"


@pytest.mark.parametrize(("sizes", "since"), [([], 0.0), (steadily(3), 3)])
def test_one_census_or_none_shows_no_growth(sizes: list[tuple[float, float]], since: float) -> None:
    proof = prove(sizes)
    assert (proof.certainty, proof.rate, proof.intervals, proof.since) == (None, 0.0, 0, since)
    assert proof.reason == "it did not grow up to the last census"


def test_the_rate_of_periodic_growth_is_over_whole_periods() -> None:
    """From the first census the nearest to whole periods; of equally near ones the longest counts."""
    assert prove([(10, 0), (19, 5), (30, 10), (38, 12)], period=10).rate == 0.5  # 10 to 30
    assert prove([(10, 0), (18, 8), (24, 9)], period=10).rate == pytest.approx(9 / 14)  # all


def test_counter_must_show_half_of_the_rate_since_onset() -> None:
    asked = []

    def contradicted(rate: float, since: float) -> bool:
        asked.append((rate, since))
        return True

    proof = prove(steadily(3, 12, 14, 20), contradicted)
    assert proof.certainty is None and proof.reason
    assert asked == [(MIB / 2, 3)]


def test_what_was_there_before_an_onset_does_not_dilute_the_rate() -> None:
    sizes = [
        (3.0, 5.0 * MIB),
        (192.0, 6.0 * MIB),
        (200.0, 14.0 * MIB),
        (210.0, 24.0 * MIB),
        (230.0, 44.0 * MIB),
    ]
    proof = prove(sizes)
    assert (proof.certainty, proof.rate, proof.since) == ("proven", MIB, 192)


def test_interval_of_the_onset_counts_without_others() -> None:
    sizes = [(3.0, 0.0), (192.0, 2.0 * MIB), (194.0, 4.0 * MIB), (198.0, 8.0 * MIB)]
    assert prove(sizes).certainty == "suspected"


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([0, 80, 120, 140], id="slower and slower"),
        pytest.param([0, 100, 101, 200], id="hardly at all in between"),
        pytest.param([0, 1000, 1010, 1020], id="once, and a little since"),
    ],
)
def test_uneven_growth_stays_a_suspicion(sizes: list[float]) -> None:
    proof = prove([(10.0 * at, size) for at, size in enumerate(sizes)])
    assert proof.certainty == "suspected" and proof.reason


@given(
    st.lists(st.integers(1, 10_000), min_size=4, max_size=9, unique=True),
    st.integers(1, 1 << 40),
    st.integers(0, 1 << 40),
)
def test_steady_growth_is_always_proven_with_its_rate(at: list[int], rate: int, base: int) -> None:
    proof = prove([(position, base + rate * position) for position in sorted(at)])
    assert proof.certainty == "proven" and proof.stopped is None
    assert 3 <= proof.intervals < len(at)
    assert proof.rate == pytest.approx(rate)


@given(st.lists(st.integers(1, 1 << 40), min_size=4, max_size=4, unique=True))
def test_proven_growth_shows_in_every_interval_that_counts(sizes: list[int]) -> None:
    points = [(float(at), float(size)) for at, size in enumerate(sorted(sizes))]
    proof = prove(points)
    counted = [size for at, size in points if at >= proof.since]
    rates = [after - before for before, after in pairwise(counted)]
    assert len(rates) == proof.intervals >= 3
    if proof.certainty == "proven":
        assert min(rates) >= 0.3 * proof.rate


@pytest.mark.parametrize(("short", "intervals"), [(3, 4), (2, 3)])
def test_an_interval_below_a_quarter_of_the_longest_is_too_short(short: int, intervals: int) -> None:
    proof = prove(steadily(0, 10, 10 + short, 20 + short, 30 + short))
    assert (proof.certainty, proof.intervals) == ("proven", intervals)


def test_intervals_too_short_to_compare_are_joined() -> None:
    """An entry of 10 MiB comes every ten positions, and the last census soon after the one before."""
    at = (20.0, 60.0, 100.0, 180.0, 198.0)
    proof = prove([(position, position // 10 * 10 * MIB) for position in at])
    assert proof.certainty == "proven"
    assert proof.rate == pytest.approx(MIB, rel=0.1)


def test_a_size_that_varied_before_needs_more_intervals() -> None:
    assert prove(steadily(3, 12, 24, 36), fell=True).reason == "it grew over 3 of 5 intervals"
    assert prove(steadily(3, 12, 24, 36, 48, 60), fell=True).certainty == "proven"


@pytest.mark.parametrize(
    ("sizes", "stopped"),
    [
        pytest.param(steadily(10, 20, 40, 80, 160), None, id="regular"),
        pytest.param([*steadily(10, 20, 40, 80), (160, 130.0 * MIB)], 125.0, id="stopped in between"),
        pytest.param(
            [(10, 10.0), (20, 24.0), (40, 36.0), (80, 84.0), (160, 148.0)], None, id="uneven anyway"
        ),
        pytest.param([*steadily(10, 20, 40, 80), (160, 200.0 * MIB)], None, id="faster"),
        pytest.param(
            [(10, 10.0), (20, 20.5), (40, 39.5), (80, 80.5), (160, 148.0)],
            147.02,
            id="less than it varies",
        ),
        pytest.param(
            [(40, 1.0), (80, 2.0), (160, 4.0), (240, 5.0)], None, id="one rise less, of what comes seldom"
        ),
    ],
)
def test_the_last_interval_says_where_an_exact_growth_may_have_stopped(
    sizes: list[tuple[float, float]], stopped: float | None
) -> None:
    proof = prove(sizes)
    assert (proof.certainty, proof.stopped) == ("proven", stopped and pytest.approx(stopped, abs=0.01))


def by_tens(*sizes: float) -> list[tuple[float, float]]:
    return [(10.0 * at, size) for at, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("first", "since", "rate"),
    [
        pytest.param(9.0, 0.0, 39 / 40, id="nine tenths of the others: it counts"),
        pytest.param(8.9, 10.0, 1.0, id="less: growth began within it"),
    ],
)
def test_the_first_interval_counts_from_nine_tenths_of_the_others(
    first: float, since: float, rate: float
) -> None:
    proof = prove(by_tens(0, first, first + 10, first + 20, first + 30))
    assert (proof.certainty, proof.since, proof.rate) == ("proven", since, pytest.approx(rate))


@pytest.mark.parametrize(("first", "rate"), [(9.0, 29 / 30), (8.9, 1.0)])
def test_a_first_interval_that_is_needed_counts_but_not_for_the_rate(first: float, rate: float) -> None:
    proof = prove(by_tens(0, first, first + 10, first + 20))
    assert (proof.certainty, proof.since, proof.rate) == ("proven", 0.0, pytest.approx(rate))


@pytest.mark.parametrize(
    ("sizes", "certainty"),
    [
        pytest.param((0, 27, 33, 60), "proven", id="the least shows three tenths of the rate"),
        pytest.param((0, 27, 32.9, 59.9), "suspected", id="the least shows less"),
        pytest.param((0, 10, 20, 25), "proven", id="the last shows half of the first"),
        pytest.param((0, 10, 20, 24.9), "suspected", id="the last shows less than half"),
    ],
)
def test_every_interval_shows_its_share(sizes: tuple[float, ...], certainty: str) -> None:
    assert prove(by_tens(*sizes)).certainty == certainty


@pytest.mark.parametrize(
    ("sizes", "policy", "certainty"),
    [
        pytest.param((0, 20, 36, 48), POLICY, "proven", id="a rate that falls to six tenths"),
        pytest.param((0, 20, 36, 47.9), POLICY, "suspected", id="lower"),
        pytest.param((0, 20, 31, 42.9), POLICY, "proven", id="lower, but not in each interval"),
        pytest.param((0, 20, 36, 46), BY_TIME, "proven", id="over seconds, to a half"),
        pytest.param((0, 20, 36, 45.9), BY_TIME, "suspected", id="over seconds, lower"),
    ],
)
def test_what_slows_down_in_each_interval_may_fill(
    sizes: tuple[float, ...], policy: ProofPolicy, certainty: str
) -> None:
    proof = prove(by_tens(*sizes), policy=policy)
    assert (proof.certainty, proof.fills) == (certainty, certainty == "suspected")


def test_intervals_that_are_joined_do_not_hide_that_what_fills_slows_down() -> None:
    """A cache with an entry for each shape, of 8 censuses of which 4 would be compared."""
    at = (5.2, 10.2, 10.51, 11.16, 12.45, 14.03, 15.8, 18.53)
    sizes = (24, 38, 39, 40, 43, 46, 48, 53)
    proof = prove(list(zip(at, sizes, strict=True)))
    assert (proof.certainty, proof.reason) == ("suspected", "it grows more and more slowly")


@pytest.mark.parametrize(
    ("grown", "uneven"),
    [
        pytest.param([6.5, 12.8, 12.9, 22.1, 28.3, 30.2, 38.2, 51.2, 62.1], False, id="at random"),
        pytest.param([6.5, 12.8, 16.0, 28.0, 32.0, 36.0, 38.2, 40.2, 41.0], True, id="ever more slowly"),
    ],
)
def test_of_many_censuses_a_few_even_intervals_are_enough(grown: list[float], uneven: bool) -> None:
    """A loop keeps one batch of four, of any length: of two in a row there may be none, or both."""
    assert prove(list(zip((3, 6, 8, 17, 22, 30, 39, 51, 67), grown, strict=True))).uneven == uneven


@pytest.mark.parametrize(("last", "stops"), [(304.0, False), (303.9, True)])
def test_regular_growth_has_stopped_when_a_twentieth_is_missing(last: float, stops: bool) -> None:
    sizes = [(10, 10), (20, 20), (40, 40), (80, 80), (400, 80 + last)]
    assert (prove(sizes).stopped is not None) == stops


def test_two_intervals_are_too_few_to_see_that_growth_slows() -> None:
    proof = prove(by_tens(0, 5, 25, 38))
    assert (proof.certainty, proof.stopped, proof.rate) == ("proven", None, pytest.approx(33 / 20))


def test_a_short_first_interval_is_joined_with_the_next() -> None:
    proof = prove(steadily(0, 1, 10, 20, 30))
    assert (proof.intervals, proof.since) == (3, 0)


@pytest.mark.parametrize(("last", "stops"), [(149.5, False), (149.3, True)])
def test_uneven_growth_has_stopped_when_four_times_that_is_missing(last: float, stops: bool) -> None:
    # Rises of 12 and 8 where 10 are expected: 2 x 2 / 10, twice. Of 200 they differ by a root of 0.8 x 200.
    proof = prove([(0, 0), (10, 12), (20, 20), (220, 20 + last)])
    assert (proof.certainty, proof.stopped is not None) == ("proven", stops)


@pytest.mark.parametrize(("first", "rate"), [(9.0, 1.0), (8.9, 11 / 17)])
def test_censuses_nine_tenths_of_a_period_apart_show_its_rate(first: float, rate: float) -> None:
    assert prove([(0, 0), (first, 9), (13, 10), (17, 11)], period=10).rate == pytest.approx(rate)


def course(seed: int) -> list[tuple[float, float]]:
    """Places and bytes of some censuses: steady, uneven, slowing down or in single rises."""
    chance = random.Random(seed)
    at, nbytes, sizes = float(chance.randrange(1, 9)), 0.0, []
    rises: Callable[[float], float] = [
        lambda distance: distance,
        lambda distance: distance * chance.uniform(0.2, 1.8),
        lambda distance: distance / (1 + at / 20),
        lambda distance: max(1.0, round(distance / 7) * 7.0),
        lambda distance: distance * (0.93 + 0.05 * chance.random()),
    ][seed % 5]
    for _ in range(chance.randrange(2, 10)):
        sizes.append((at, nbytes))
        distance = chance.choice([1, 2, 2, 4, 8, 8, 20])
        at, nbytes = at + distance, nbytes + MIB * rises(distance)
    return sizes


def test_all_of_the_proof_of_many_courses() -> None:
    rows = []
    for seed in range(150):
        for policy, period, fell in ((POLICY, None, False), (BY_TIME, None, False), (POLICY, 7.0, True)):
            proof = prove(course(seed), policy=policy, period=period, fell=fell)
            stopped = None if proof.stopped is None else f"{proof.stopped:.4g}"
            rows.append([
                proof.certainty, f"{proof.rate:.4g}", proof.intervals, proof.since, proof.reason, stopped,
                proof.uneven, proof.fills,
            ])  # fmt: skip
    assert_as_kept("proofs", rows)
