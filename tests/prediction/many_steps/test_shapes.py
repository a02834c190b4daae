"""The shapes of a run's steps: what tells two apart, in which order they come, and which are traced."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.prediction.many_steps.shapes import (
    NOTHING,
    Shape,
    choose,
    input_of,
    inputs_of,
    shape_of,
    varying,
)


@dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor


def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


@pytest.mark.parametrize(
    ("value", "numbers", "volume", "text"),
    [
        (zeros(2, 7), (2, 7), 14, "2x7"),
        (zeros(), (), 1, "scalar"),
        (np.zeros((3, 4)), (3, 4), 12, "3x4"),
        ({"ids": zeros(2, 7), "mask": zeros(2, 9)}, (2, 7, 2, 9), 32, "ids 2x7, mask 2x9"),
        ([zeros(5), (zeros(2, 3),)], (5, 2, 3), 11, "5, 2x3"),
        ({"ids": zeros(2, 7), "names": ["a", "b"]}, (2, 7, 2), 14, "ids 2x7"),
        ([1.5, 2.5, 3.5], (3,), 0, "list"),
        (Batch(zeros(4), zeros(6)), (4, 6), 10, "ids 4, mask 6"),
        ("text", (), 0, "str"),
        ([], (), 0, "list"),
    ],
)
def test_a_batch_has_the_sizes_of_all_its_tensors(
    value: Any, numbers: tuple[int, ...], volume: int, text: str
) -> None:
    shape = shape_of(value)
    assert (shape.numbers, shape.volume, shape.text) == (numbers, volume, text)
    assert input_of(value).arguments == (value,)
    assert input_of(value).shape == shape


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (zeros(2, 7), torch.ones(2, 7, dtype=torch.int64), True),
        (zeros(2, 7), zeros(2, 8), False),
        (zeros(2, 7), zeros(2, 7, dtype=torch.int32), False),
        (zeros(2, 7), zeros(14), False),
        ({"ids": zeros(2)}, {"labels": zeros(2)}, False),
        ([zeros(2)], (zeros(2),), False),
        (["a", "b"], ["c", "d"], True),
        (["a", "b"], [1, 2], False),
        (3.5, 4.5, True),
    ],
)
def test_two_batches_are_alike_by_sizes_types_and_names(one: Any, other: Any, same: bool) -> None:
    assert (shape_of(one) == shape_of(other)) == same


def test_numbers_and_tuples_of_them_are_arguments() -> None:
    eight = input_of((8, 512))
    assert (eight.arguments, eight.shape.numbers, eight.shape.volume) == ((8, 512), (8, 512), 4096)
    assert eight.shape.text == "8 x 512"
    assert (input_of(64).arguments, input_of(64).shape.text) == ((64,), "64")
    assert input_of(64).shape.form != eight.shape.form
    assert input_of(True).arguments == (True,) and input_of(True).shape.numbers == ()
    assert input_of(()).shape.text == "tuple"


def test_lengths_come_in_order_and_begin_again() -> None:
    assert [each.arguments for each in inputs_of([1, 2, 3], 5)] == [(1,), (2,), (3,), (1,), (2,)]
    assert [each.arguments for each in inputs_of(iter([1, 2, 3]), 2)] == [(1,), (2,)]
    assert len(inputs_of([1, 2, 3], None)) == 3
    assert inputs_of(None, 2) == [NOTHING] * 2


def test_of_one_shape_one_batch_is_kept() -> None:
    first, again = zeros(2, 7), zeros(2, 7)
    assert all(each.arguments[0] is first for each in inputs_of([first, again], None))


def test_a_histogram_is_shuffled_but_always_alike() -> None:
    histogram = {512: 30, 64: 10}
    lengths = [each.arguments[0] for each in inputs_of(histogram, None)]
    assert sorted(lengths) == [64] * 10 + [512] * 30
    assert lengths != sorted(lengths) and lengths != sorted(lengths, reverse=True)
    assert lengths == [each.arguments[0] for each in inputs_of(histogram, None)]


@pytest.mark.parametrize(
    ("lengths", "steps", "words"),
    [
        (None, None, "neither lengths nor steps"),
        ([1], 0, "steps=0; expected at least 1"),
        ([], None, "has 0 entries"),
        (iter([1, 2]), 5, "has 2 entries; expected one for each step"),
    ],
)
def test_inputs_that_cannot_be_used_are_refused(lengths: Any, steps: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        inputs_of(lengths, steps)


# --- which are traced ---------------------------------------------------------------------------------------


def sized(*numbers: int, form: str = "x") -> Shape:
    return Shape(form, numbers, numbers[0], "")


def test_up_to_32_shapes_are_all_traced_the_largest_first() -> None:
    choice = choose([sized(length) for length in [*range(1, 33), 5, 9]])
    assert [shape.volume for shape in choice.traced] == list(range(32, 0, -1))
    assert (choice.checked, choice.derived) == ((), ())


@given(st.sets(st.integers(1, 5000), min_size=33, max_size=200))
def test_of_more_a_sample_is_traced_and_five_are_checked(lengths: set[int]) -> None:
    choice = choose([sized(length) for length in lengths])
    assert len(choice.traced) in (16, 17, 18) and len(choice.checked) == 5
    parts = [shape.volume for part in (choice.traced, choice.checked, choice.derived) for shape in part]
    assert sorted(parts) == sorted(lengths)
    assert (choice.traced[0].volume, choice.traced[-1].volume) == (max(lengths), min(lengths))


def test_each_form_has_its_share_and_at_least_its_two_ends() -> None:
    many = [sized(length) for length in range(100, 190)]
    few = [sized(length, form="y") for length in range(10)]
    choice = choose([*many, *few])
    assert {shape.volume for shape in choice.traced if shape.form == "y"} == {0, 9}
    assert len([shape for shape in choice.traced if shape.form == "x"]) == 14


def test_the_extremes_of_each_dimension_are_traced() -> None:
    # The volume says nothing of the second dimension, whose largest is in the middle.
    shapes = [Shape("x", (length, 500 if length == 77 else 1), length, "") for length in range(151)]
    assert shapes[77] in choose(shapes).traced


def test_numbers_that_vary_alike_are_one() -> None:
    shapes = [Shape("x", (2, length, length, 9 - length), 0, "") for length in (3, 5, 3)]
    assert varying(shapes) == [1, 3]
