"""Counting the steps of another process by the whole numbers in its variables."""

from __future__ import annotations

from memtriage.session.outside_helper import _between, _LoopCounter


def counted(values: list[int]) -> _LoopCounter:
    counter = _LoopCounter(values[0])
    for value in values[1:]:
        counter.add(value)
    return counter


def test_a_counter_of_steps_has_the_unit_one_and_goes_on_after_it_began_again() -> None:
    steps = counted([3, 5, 8, 8, 9, 2, 4])
    assert (steps.total, steps.changes, steps.unit) == (10, 5, 1)


def test_a_count_of_samples_has_another_unit() -> None:
    assert counted([16, 48, 96, 112]).unit == 16


def test_steps_between_two_counts_are_interpolated() -> None:
    assert _between((10.0, 100), (14.0, 120), 11.0) == 105
    assert _between((10.0, None), (14.0, 120), 11.0) is None
