"""Whether a matrix product is assumed to be padded."""

from __future__ import annotations

import torch

from memtriage.prediction.compiled.padding import MatrixProduct
from memtriage.prediction.gpu_kinds import machine

H200 = machine("h200")
ROWS, WIDTH, WORDS, MORE = 8192, 768, 50257, 3


def product(rows, inner, columns, added, **changed):
    given = {
        "dtype": torch.float32,
        "batch": 1,
        "made_padded": (False, False),
        "in_rows": (True, True),
    }
    return MatrixProduct(rows=rows, inner=inner, columns=columns, added=added, **{**given, **changed})


def test_a_product_whose_small_operand_is_copied_is_padded():
    logits = product(ROWS, WIDTH, WORDS, (0, 0, MORE), in_rows=(True, False))
    assert logits.is_worth_timing(H200)
    assert logits.is_faster_padded(H200)


def test_a_large_operand_is_copied_where_rows_stay_rows():
    assert product(ROWS, WORDS, WIDTH, (0, MORE, 0)).is_faster_padded(H200)


def test_a_large_operand_that_lies_in_columns_is_not_copied():
    """GPT-2's gradient of the embedding on an H200: the second step's peak is a copy of the logits lower."""
    gradient = product(WORDS, ROWS, WIDTH, (MORE, 0, 0), in_rows=(False, True))
    assert gradient.is_worth_timing(H200)
    assert not gradient.is_faster_padded(H200)


def test_an_operand_that_can_be_made_padded_costs_nothing():
    gradient = product(WORDS, ROWS, WIDTH, (MORE, 0, 0), in_rows=(False, True), made_padded=(True, True))
    assert gradient.is_faster_padded(H200)


def test_a_product_that_is_bound_by_memory_is_not_timed():
    assert not product(ROWS, 8, WORDS, (0, 0, MORE)).is_worth_timing(H200)


def test_sizes_of_what_is_timed():
    logits = product(10, 4, 5, (0, 0, 3), batch=2, made_padded=(False, False))
    assert logits.operands() == [2 * 10 * 4 * 4, 2 * 4 * 5 * 4]
    assert logits.result() == 2 * 10 * 5 * 4
    assert logits.padded() == ([], [2 * 4 * 8 * 4, 2 * 10 * 8 * 4])
    beforehand = product(10, 4, 5, (0, 0, 3), made_padded=(True, True))
    assert beforehand.padded() == ([4 * 8 * 4], [10 * 8 * 4])


def test_an_odd_number_of_half_precision_elements_is_slowest():
    """Rows of an even number can still be copied asynchronously, so that fewer copies of operands pay."""
    given = {"dtype": torch.bfloat16, "in_rows": (False, True)}
    odd = product(50257, 2048, 1024, (7, 0, 0), **given)
    even = product(50258, 2048, 1024, (6, 0, 0), **given)
    assert odd.is_faster_padded(H200)
    assert not even.is_faster_padded(H200)
