"""The order of trials favors no variant."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.prove.schedule import given_up, remaining_s, round_order, schedule

COUNTS = st.integers(1, 12)


@given(COUNTS, st.integers(0, 40))
def test_every_round_has_every_variant_once(count: int, number: int) -> None:
    assert sorted(round_order(count, number)) == list(range(count))


@given(COUNTS, st.integers(1, 30))
def test_places_are_shared_out_evenly_at_any_time(count: int, rounds: int) -> None:
    places = Counter(
        (variant, place)
        for number in range(rounds)
        for place, variant in enumerate(round_order(count, number))
    )
    taken = [places[variant, place] for variant in range(count) for place in range(count)]
    assert max(taken) - min(taken) <= 1


@given(COUNTS)
def test_each_variant_follows_each_other_equally_often(count: int) -> None:
    rounds = count if count % 2 == 0 else 2 * count
    followed = Counter(pair for number in range(rounds) for pair in pairwise(round_order(count, number)))
    others = {(first, other) for first in range(count) for other in range(count) if first != other}
    assert set(followed) == others
    assert len(set(followed.values())) <= 1


@given(st.lists(st.text(min_size=1), min_size=1, max_size=6, unique=True), st.integers(1, 7))
def test_the_schedule_has_every_trial_once(names: list[str], repeats: int) -> None:
    trials = schedule(names, repeats)
    assert len(set(trials)) == len(trials) == len(names) * repeats
    assert [number for number, _ in trials] == sorted(number for number, _ in trials)


@pytest.mark.parametrize(
    ("failures", "after", "gone"),
    [
        ({}, 1, False),
        ({0: True}, 1, True),
        ({0: True}, 2, False),
        ({0: True, 1: True}, 2, True),
        ({0: True, 1: False, 2: True}, 2, False),
        ({2: True, 1: True, 0: False}, 2, True),
    ],
)
def test_giving_up(failures: dict[int, bool], after: int, gone: bool) -> None:
    assert given_up(failures, after) is gone


def test_remaining_time() -> None:
    assert remaining_s(["a"], {}) is None
    assert remaining_s(["a", "a", "b"], {"a": [2.0, 4.0]}) == pytest.approx(9.0)
    assert remaining_s(["a", "b"], {"a": [2.0], "b": [10.0], "c": []}) == pytest.approx(12.0)
    assert remaining_s([], {"a": [1.0]}) == 0
