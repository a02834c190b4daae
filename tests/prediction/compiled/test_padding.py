"""Whether a matrix product is assumed to be padded."""

import pytest
import torch

from memtriage.prediction.compiled.padding import MatrixProduct, Paddings
from memtriage.prediction.gpu_kinds import machine

H100, H200 = machine("h100"), machine("h200")
ROWS, WIDTH, WORDS, MORE = 8192, 768, 50257, 3


def product(rows, inner, columns, added, **changed):
    given = {
        "dtype": torch.float32,
        "batch": 1,
        "made_padded": (False, False),
        "in_rows": (True, True),
    }
    return MatrixProduct(rows=rows, inner=inner, columns=columns, added=added, **{**given, **changed})


@pytest.mark.parametrize(
    ("made", "padded"),
    [
        # A small operand is copied; a large one only where rows stay rows.
        (product(ROWS, WIDTH, WORDS, (0, 0, MORE), in_rows=(True, False)), True),
        (product(ROWS, WORDS, WIDTH, (0, MORE, 0)), True),
        # GPT-2's gradient of the embedding on an H200: the second step's peak is a copy of the logits lower.
        (product(WORDS, ROWS, WIDTH, (MORE, 0, 0), in_rows=(False, True)), False),
        # One that can be made padded costs nothing.
        (product(WORDS, ROWS, WIDTH, (MORE, 0, 0), in_rows=(False, True), made_padded=(True, True)), True),
        # The kernels that copy take longer than the product: a classifier of ten classes.
        (product(64, WIDTH, 10, (0, 0, 2), in_rows=(True, False)), False),
    ],
)
def test_a_product_is_padded_where_that_pays(made, padded):
    assert made.is_faster_padded(H200) is padded
    assert made.is_sure(H200) or made.made_padded == (True, True)


def test_the_gradient_of_an_embedding_is_padded_where_an_h100_does():
    for rows, width, padded in ((4096, 1024, True), (4096, WIDTH, False), (5600, WIDTH, False)):
        gradient = product(
            *(WORDS, rows, width, (7, 0, 0)),
            dtype=torch.bfloat16,
            in_rows=(False, True),
            made_padded=(False, True),
        )
        assert gradient.is_faster_padded(H100) is padded
        assert not gradient.is_sure(H100)


@pytest.mark.parametrize(
    ("lengths", "added", "changed"),
    [
        ((197, 197, 64), (3, 3, 0), {"made_padded": (True, True)}),
        ((197, 64, 197), (3, 0, 3), {"made_padded": (True, True)}),
        ((64, 197, 197), (0, 3, 3), {"made_padded": (False, True), "in_rows": (False, True)}),
        ((197, 64, 197), (3, 0, 3), {"made_padded": (True, False), "in_rows": (True, False)}),
        ((197, 197, 64), (3, 3, 0), {"made_padded": (False, True), "in_rows": (False, True)}),
    ],
)
def test_products_that_memory_bounds_are_left_as_an_h100_leaves_them(lengths, added, changed):
    """Those of ViT's attention; with autocast, those of backward are in half precision."""
    dtype = torch.float32 if changed["made_padded"] == (True, True) else torch.bfloat16
    attention = product(*lengths, added, dtype=dtype, batch=768, **changed)
    assert not attention.is_faster_padded(H100)
    assert not attention.is_sure(H100)


def test_the_remark_names_the_largest_of_what_is_not_sure():
    paddings = Paddings(H200)
    assert paddings.remark() is None
    assert paddings.is_padded(product(ROWS, WIDTH, WORDS, (0, 0, MORE), in_rows=(True, False)))
    assert paddings.remark() is None
    paddings.is_padded(product(ROWS, 8, 4001, (0, 0, MORE)))
    paddings.is_padded(product(ROWS, 8, WORDS, (0, 0, MORE)))
    remark = paddings.remark()
    assert "2 matrix products" in remark
    assert f"[{ROWS}, 8] @ [8, {WORDS}] float32, is assumed to be left as it is" in remark
    grown = product(ROWS, 8, WORDS, (0, 0, MORE)).at_stake()
    copied, longer = 8 * (WORDS + MORE) * 4, ROWS * MORE * 4
    assert grown == max(copied, longer)


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
