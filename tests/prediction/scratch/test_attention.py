"""What softmax's backward holds besides its result: gradient times output."""

from __future__ import annotations

import pytest
import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.scratch.attention import OF_PACKAGES, RULES


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_softmax_product_has_the_type_of_the_gradient(source: torch.dtype) -> None:
    rule = RULES[torch.ops.aten._softmax_backward_data.default]
    gradient, result = torch.ones(2, 3, 8, 8), torch.empty(2, 3, 8, 8, dtype=source)
    assert rule((gradient, gradient, -1, source), {}, [result], machine("h200")) == [2 * 3 * 8 * 8 * 4]


def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("width", "dtype", "buffers"),
    [
        (128, torch.bfloat16, []),
        (192, torch.bfloat16, [2 * 4 * 100 * 192 * 4]),
        (192, torch.float32, []),
    ],
)
def test_wide_heads_of_half_precision_are_summed_in_single(
    width: int, dtype: torch.dtype, buffers: list[int]
) -> None:
    rule = RULES[torch.ops.aten._scaled_dot_product_efficient_attention.default]
    heads = shaped(2, 4, 100, width, dtype=dtype)
    assert rule((heads, heads, heads), {}, [], machine("h200")) == buffers


def test_backward_of_float32_has_products_and_their_sums() -> None:
    rule = RULES[torch.ops.aten._scaled_dot_product_efficient_attention_backward.default]
    query, value = shaped(2, 4, 100, 64, dtype=torch.float32), shaped(2, 4, 100, 32, dtype=torch.float32)
    sums = 2 * 4 * 100 * 4
    assert rule((value, query, query, value), {}, [], machine("h200")) == [sums * 32, sums]


def test_grouped_keys_have_gradients_for_every_head() -> None:
    rule = RULES[torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default]
    query, key = shaped(2, 8, 100, 64), shaped(2, 2, 50, 64)
    own = 2 * 8 * 100 * (64 + 1) * 4
    assert rule((query, query, query, query), {}, [], machine("h200")) == [own]
    assert rule((query, query, key, key), {}, [], machine("h200")) == [own + 2 * (2 * 8 * 50 * 64 * 2)]


def test_a_safe_softmax_looks_for_rows_without_scores() -> None:
    """Which scores are minus infinity, a byte each; which rows have no others; and a zero for these."""
    rule = RULES[torch.ops.aten._safe_softmax.default]
    scores = shaped(2, 4, 100, 50)
    assert rule((scores, -1), {}, [scores], machine("h200")) == [2 * 4 * 100 * 50, 2 * 4 * 100, 2]
    assert rule((shaped(3, 0), -1), {}, [scores], machine("h200")) == [0, 0, 2]


@pytest.mark.parametrize(
    ("width", "elements"),
    [
        (64, 2 * 1 * (64 * 64 + 4)),
        (192, 2 * 3 * (64 * 64 + 4) + 128 * (192 + 192)),  # too wide for registers
    ],
)
def test_backward_of_half_precision_has_gradients_in_tiles_of_64(width: int, elements: int) -> None:
    rule = RULES[torch.ops.aten._scaled_dot_product_efficient_attention_backward.default]
    heads = shaped(2, 4, 100, width)
    sums = 2 * 4 * 100 * 4
    assert rule((heads, heads, heads, heads), {}, [], machine("h200")) == [2 * 4 * elements * 4, sums]


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


@pytest.mark.parametrize(
    ("length", "width", "rows", "rounded"),
    [(128, 64, 128, 64), (129, 64, 256, 64), (1, 33, 128, 64), (128, 128, 128, 128), (128, 129, 128, 192)],
)
def test_flash_backward_rounds_lengths_to_128_and_heads_to_32_or_64(
    length: int, width: int, rows: int, rounded: int
) -> None:
    heads = shaped(2, 4, length, width)
    sums = 2 * 4 * rows * 4
    assert RULES[FLASH]((heads,) * 4, {}, [], machine("h200")) == [sums, sums * rounded]


def test_grouped_heads_of_flash_have_gradients_for_every_head() -> None:
    query, key = shaped(2, 8, 128, 64), shaped(2, 2, 128, 64)
    expanded = 2 * 8 * 128 * 64 * 2
    buffers = RULES[FLASH]((query, query, key, key), {}, [], machine("h200"))
    assert buffers[2:] == [expanded, expanded]


def test_the_packages_heads_come_after_the_length() -> None:
    rule = OF_PACKAGES["flash_attn::_flash_attn_backward"]
    heads = shaped(2, 129, 4, 64)
    assert rule((heads,) * 4, {}, [], machine("h200")) == [2 * 4 * 256 * 64 * 4]
    query, key = shaped(2, 128, 8, 64), shaped(2, 128, 2, 64)
    assert rule((query, query, key, key), {}, [], machine("h200"))[1:] == [2 * 128 * 8 * 64 * 2] * 2


def test_packed_inputs_have_a_tile_more_each() -> None:
    rule = OF_PACKAGES["flash_attn::_flash_attn_varlen_backward"]
    packed, starts = shaped(300, 4, 64), shaped(4)
    arguments = (packed,) * 4 + (None,) * 5 + (starts,)
    assert rule(arguments, {}, [], machine("h200")) == [(300 + 128 * 3) * 4 * 64 * 4]
