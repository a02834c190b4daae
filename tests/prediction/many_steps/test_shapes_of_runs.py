"""The order in which steps of a run are traced."""

from __future__ import annotations

from memtriage.prediction.many_steps.shapes import SAMPLED, TRACED_AT_MOST, Shape, input_of, run_shapes


def shape(length: int) -> Shape:
    return input_of(length).shape


def test_the_largest_traced_shape_comes_again_at_the_end() -> None:
    lengths = [5, 7, 2, 9, 2, 4]
    planned = run_shapes([shape(each) for each in lengths])
    assert (planned.first, planned.shapes) == (2, [shape(each) for each in lengths])
    assert planned.traced == tuple(shape(each) for each in (5, 7, 9, 4, 2, 9))
    assert run_shapes([shape(5)]).traced == (shape(5),)
    longer = [*lengths, 4, 2]
    assert run_shapes([shape(each) for each in longer], 4).traced == tuple(
        shape(each) for each in (5, 7, 2, 9, 4, 2, 4)
    )


def test_no_more_steps_are_traced_than_the_run_has() -> None:
    lengths = [shape(each) for each in (5, 7, 2, 9, 2, 4)]
    planned = run_shapes(lengths, 4)
    assert (planned.first, planned.traced) == (6, tuple(lengths))
    assert planned.choice.traced == ()


def test_derived_shapes_are_not_traced_but_checked_ones_are() -> None:
    later = [shape(each) for each in range(1, TRACED_AT_MOST + 2)]
    planned = run_shapes([shape(500), shape(600), *later])
    choice = planned.choice
    largest = shape(TRACED_AT_MOST + 1)
    assert planned.traced == (shape(500), shape(600), *choice.traced, *choice.checked, largest)
    assert (choice.traced[0], len(choice.traced), len(choice.checked)) == (largest, SAMPLED, 5)
    assert {*choice.traced, *choice.checked, *choice.derived} == set(later)
