"""Which ranks are alike and which stand out: a few jobs by hand, and what must hold for any job."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.ranks.groups import POLICY, Grouping, group_ranks
from memtriage.model.rank_groups import RankFigures

MIB = 1024**2
GIB = 1024**3


def rank(number: int, allocated: int, **more: int | None) -> RankFigures:
    known: dict[str, int | None] = {
        "base": allocated,
        "reserved": allocated + 8 * GIB,
        "peak": allocated + 6 * GIB,
        "resident": 9 * GIB,
        "growth": 0,
        "steps": 100,
        "marks": 400,
    }
    return RankFigures(rank=number, allocated=allocated, **(known | more))


def job(allocated: Sequence[int]) -> list[RankFigures]:
    return [rank(number, value) for number, value in enumerate(allocated)]


def noisy(ranks: int, middle: int = 50 * GIB, spread: int = 40 * MIB, seed: int = 1) -> list[int]:
    noise = random.Random(seed)
    return [round(noise.gauss(middle, spread)) for _ in range(ranks)]


def named(grouping: Grouping) -> dict[int, list[str]]:
    return {
        number: [difference.figure for difference in found]
        for number, found in sorted(grouping.differences.items())
    }


# Identical, noisy, heterogeneous


@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_identical_ranks_are_one_group(ranks: int) -> None:
    assert group_ranks(job([40 * GIB] * ranks)) == Grouping([list(range(ranks))], {})


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_noise_makes_neither_groups_nor_outliers(ranks: int) -> None:
    assert group_ranks(job(noisy(ranks))) == Grouping([list(range(ranks))], {})


@pytest.mark.parametrize("ranks", [4, 32, 512])
def test_where_all_ranks_differ_none_stands_out(ranks: int) -> None:
    uneven = [round(10 * GIB * 1.07**place) if ranks < 64 else (10 + place) * GIB for place in range(ranks)]
    grouping = group_ranks(job(uneven))
    assert grouping.groups == [list(range(ranks))]
    assert grouping.differences == {}


def test_a_run_of_one_rank_is_not_compared() -> None:
    assert group_ranks(job([GIB])) == Grouping()


# Groups by design


@pytest.mark.parametrize(
    ("ranks", "stages"), [(4, 2), (8, 2), (8, 4), (64, 4), (64, 8), (1024, 4), (1024, 16), (1024, 32)]
)
def test_stages_of_a_pipeline_are_groups(ranks: int, stages: int) -> None:
    size = ranks // stages
    levels = [(20 + 4 * stage) * GIB for stage in range(stages)]
    grouping = group_ranks(job([levels[number // size] + number % 3 * MIB for number in range(ranks)]))
    assert sorted(grouping.groups) == [list(range(first, first + size)) for first in range(0, ranks, size)]
    assert grouping.differences == {}


@pytest.mark.parametrize(("ranks", "groups"), [(4, 1), (64, 2)])
def test_of_few_ranks_groups_must_differ_more(ranks: int, groups: int) -> None:
    half = ranks // 2
    assert len(group_ranks(job([20 * GIB] * half + [21 * GIB] * half)).groups) == groups
    assert len(group_ranks(job([20 * GIB] * half + [23 * GIB] * half)).groups) == 2


def test_what_differs_by_little_makes_no_groups_however_small_it_is() -> None:
    small = 100 * MIB
    assert len(group_ranks(job([small] * 32 + [small + 60 * MIB] * 32)).groups) == 1
    assert len(group_ranks(job([small] * 32 + [small + 70 * MIB] * 32)).groups) == 2


def test_stages_that_lie_interleaved_are_groups_too() -> None:
    grouping = group_ranks(job([(20 + 10 * (number % 4)) * GIB for number in range(64)]))
    assert sorted(grouping.groups) == [list(range(stage, 64, 4)) for stage in range(4)]


def test_stages_that_differ_only_at_their_peak_are_groups() -> None:
    ranks = [rank(number, 20 * GIB, peak=(70 - 8 * (number // 16)) * GIB) for number in range(64)]
    grouping = group_ranks(ranks)
    assert len(grouping.groups) == 4
    assert grouping.differences == {}


def test_an_outlier_is_held_against_its_own_stage() -> None:
    levels = [20 * GIB] * 32 + [30 * GIB] * 32
    levels[40] += 2 * GIB
    grouping = group_ranks(job(levels))
    assert grouping.groups == [list(range(32)), list(range(32, 64))]
    (difference, *_) = grouping.differences.pop(40)
    assert (difference.figure, difference.value, difference.usual) == ("allocated", 32 * GIB, 30 * GIB)
    assert (difference.spread, difference.peers) == (0, 31)
    assert grouping.differences == {}


def test_many_strays_between_two_levels_make_no_groups() -> None:
    levels = [20 * GIB] * 8 + [40 * GIB] * 8
    strays = [(50 + 10 * number) * GIB for number in range(4)]
    assert len(group_ranks(job(levels + strays[:1])).groups) == 2
    assert len(group_ranks(job(levels + strays)).groups) == 1


def test_figures_of_many_modes_do_not_split_ranks_into_splinters() -> None:
    noise = random.Random(3)
    ranks = [
        rank(number, value, reserved=noise.choice([60, 63, 66, 69, 72]) * GIB,
             resident=noise.choice([8, 14, 25]) * GIB)
        for number, value in enumerate(noisy(1024))
    ]  # fmt: skip
    grouping = group_ranks(ranks)
    assert min(len(group) for group in grouping.groups) >= 32
    assert grouping.differences == {}


# Outliers


@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("more", [-8 * GIB, 8 * GIB])
def test_one_rank_with_other_memory_is_named(ranks: int, more: int) -> None:
    levels = noisy(ranks)
    levels[ranks // 3] += more
    assert named(group_ranks(job(levels))) == {ranks // 3: ["allocated", "reserved", "peak"]}


@pytest.mark.parametrize(
    ("others", "usual", "spread"),
    [
        ([10, 12, 14, 16], 13, 2),
        ([10, 12, 14], 12, 2),
        ([16, 14, 10, 12], 13, 2),
        ([10, 12, 13, 14, 16], 13, 1),
    ],
)
def test_a_rank_is_held_against_the_median_of_the_others(others: list[int], usual: int, spread: int) -> None:
    found = group_ranks(job([level * GIB for level in (*others, 90)])).differences
    assert list(found) == [len(others)]
    difference = found[len(others)][0]
    assert (difference.figure, difference.peers) == ("allocated", len(others))
    assert (difference.usual, difference.spread) == (usual * GIB, spread * GIB)


def test_small_difference_counts_among_many_ranks_only() -> None:
    many, few = noisy(256), noisy(4)
    many[7] += 2 * GIB
    few[3] += 2 * GIB
    assert list(group_ranks(job(many)).differences) == [7]
    assert group_ranks(job(few)).differences == {}


def test_of_two_ranks_the_larger_is_named() -> None:
    assert list(group_ranks(job([12 * GIB, 8 * GIB])).differences) == [0]
    assert list(group_ranks(job([8 * GIB, 12 * GIB])).differences) == [1]


def test_a_rank_that_grows_is_named_for_that_first() -> None:
    ranks = job(noisy(64))
    ranks[5] = rank(5, 62 * GIB, growth=100 * MIB, base=50 * GIB)
    assert named(group_ranks(ranks)) == {5: ["growth", "allocated", "reserved", "peak"]}


def test_a_minority_that_grows_alike_is_no_group_by_design() -> None:
    ranks = [
        rank(number, 62 * GIB, growth=100 * MIB, base=50 * GIB) if number % 4 == 0 else rank(number, 50 * GIB)
        for number in range(64)
    ]
    grouping = group_ranks(ranks)
    assert len(grouping.groups) == 1
    assert list(grouping.differences) == list(range(0, 64, 4))


def test_a_rank_that_grows_less_is_no_outlier() -> None:
    ranks = [rank(number, 62 * GIB, growth=100 * MIB, base=50 * GIB) for number in range(8)]
    ranks[3] = rank(3, 50 * GIB)
    assert group_ranks(ranks).differences == {}


def test_rank_that_fell_behind_is_named_outside_groups() -> None:
    ranks = job(noisy(64))
    ranks[9] = RankFigures(rank=9, steps=30, marks=120, killed=True)
    grouping = group_ranks(ranks)
    assert named(grouping) == {9: ["steps"]}
    assert grouping.groups == [[number for number in range(64) if number != 9]]


def test_a_rank_with_fewer_marks_is_named() -> None:
    ranks = job(noisy(64))
    ranks[60] = msgspec.structs.replace(ranks[60], marks=200)
    assert named(group_ranks(ranks)) == {60: ["marks"]}


def test_host_memory_of_one_rank() -> None:
    ranks = job(noisy(64))
    ranks[0] = msgspec.structs.replace(ranks[0], resident=30 * GIB)
    assert named(group_ranks(ranks)) == {0: ["resident"]}


def test_unknown_figures_are_not_compared() -> None:
    ranks = [rank(number, 50 * GIB, reserved=None, peak=None, resident=None) for number in range(7)]
    assert group_ranks([*ranks, rank(7, 50 * GIB)]).differences == {}


# Laws

_LEVELS = st.lists(
    st.integers(0, 40).map(lambda level: level * GIB // 2), min_size=2, max_size=40
)  # ties are common in real jobs, and what decides about them must not be the order


@given(_LEVELS, st.randoms(use_true_random=False))
def test_the_numbers_of_the_ranks_do_not_matter(levels: list[int], shuffle: random.Random) -> None:
    order = list(range(len(levels)))
    shuffle.shuffle(order)
    plain = group_ranks(job(levels))
    ranks = [rank(order[place], value) for place, value in enumerate(levels)]
    shuffle.shuffle(ranks)
    moved = group_ranks(ranks)
    assert {order[number]: found for number, found in plain.differences.items()} == moved.differences
    if len(plain.groups) > 1:
        assert {frozenset(order[number] for number in group) for group in plain.groups} == {
            frozenset(group) for group in moved.groups
        }


@given(_LEVELS)
def test_groups_divide_ranks_and_outliers_are_a_minority(levels: list[int]) -> None:
    grouping = group_ranks(job(levels))
    assert sorted(number for group in grouping.groups for number in group) == list(range(len(levels)))
    assert set(grouping.differences) <= set(range(len(levels)))
    assert 2 * len(grouping.differences) < len(levels) or len(levels) == 2


@given(_LEVELS, st.integers(2, 50))
def test_a_larger_model_changes_nothing_where_no_floor_decides(levels: list[int], factor: int) -> None:
    # Levels lie half a GiB apart, far above the floor of 64 MiB; the resident set is the same everywhere.
    def sized(by: int) -> Grouping:
        return group_ranks(
            [rank(number, value * by, reserved=None, peak=None) for number, value in enumerate(levels)]
        )

    assert sized(1).groups == sized(factor).groups
    assert set(sized(1).differences) == set(sized(factor).differences)


@given(st.integers(3, 80), st.integers(0, 10**6), st.data())
def test_what_is_far_from_all_others_is_always_named(ranks: int, seed: int, data: st.DataObject) -> None:
    which = data.draw(st.integers(0, ranks - 1))
    levels = noisy(ranks, seed=seed)
    levels[which] = 500 * GIB
    assert list(group_ranks(job(levels)).differences) == [which]


@given(st.integers(2, 80), st.integers(0, 10**6))
def test_ranks_within_the_floor_are_alike(ranks: int, seed: int) -> None:
    noise = random.Random(seed)
    levels = [GIB + noise.randrange(63 * MIB) for _ in range(ranks)]
    assert group_ranks(job(levels)) == Grouping([list(range(ranks))], {})


def test_the_number_of_ranks_that_make_a_group_grows_with_the_job() -> None:
    def largest_that_is_named(ranks: int) -> int:
        counts = range(1, ranks // 2)
        return max(
            count
            for count in counts
            if len(group_ranks(job([50 * GIB] * (ranks - count) + [60 * GIB] * count)).differences) == count
        )

    assert [largest_that_is_named(ranks) for ranks in (8, 64, 256)] == [1, 7, 15]
    assert POLICY.smallest_group == 2


@pytest.mark.parametrize(
    ("figure", "usual", "many", "few"),
    [
        ("growth", 0, 64 * 1024, 64 * 1024),
        ("allocated", 50 * GIB, GIB, 5 * GIB),
        ("allocated", GIB, 64 * MIB, GIB // 10 + 1),
        ("reserved", 100 * GIB, 5 * GIB, 10 * GIB),
        ("reserved", 100 * MIB, 64 * MIB, 64 * MIB),
        ("peak", 100 * GIB, 5 * GIB, 10 * GIB),
        ("peak", 100 * MIB, 64 * MIB, 64 * MIB),
        ("resident", 16 * GIB, 4 * GIB, 16 * GIB),
        ("resident", GIB, 2 * GIB, 2 * GIB),
        ("steps", 100, 5, 10),
        ("steps", 10, 2, 2),
        ("marks", 400, 100, 200),
        ("marks", 30, 16, 16),
    ],
)
def test_how_far_from_its_peers_a_rank_stands_out(figure: str, usual: int, many: int, few: int) -> None:
    """Of sizes on both sides; growth above its peers, and what counts progress below them."""
    for ranks, far in ((64, many), (8, few)):
        for distance, named_too in ((far - 1, False), (far, True)):
            for side in (1, -1):
                peers = [msgspec.structs.replace(each, **{figure: usual}) for each in job([40 * GIB] * ranks)]
                peers[3] = msgspec.structs.replace(peers[3], **{figure: max(0, usual + side * distance)})
                stands_out = named_too and side != {"growth": -1, "steps": 1, "marks": 1}.get(figure)
                if usual + side * distance >= 0:
                    assert named(group_ranks(peers)) == ({3: [figure]} if stands_out else {})
