"""The buffers of gradients of embeddings and of indexing that accumulates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.scratch.embedding import RULES

aten = torch.ops.aten
HOPPER = machine("h200")


def buffers(func: Any, *args: Any, **kwargs: Any) -> list[int]:
    return RULES[func](args, kwargs, [], HOPPER)


def of_embedding(tokens: int, rows: int, *more: int, dtype: torch.dtype = torch.int64) -> list[int]:
    gradient = torch.empty(tokens, 16, device="meta")
    indices = torch.empty(tokens, dtype=dtype, device="meta")
    return buffers(aten.embedding_dense_backward.default, gradient, indices, rows, *more)


def test_up_to_3072_indices_are_summed_without_sorting() -> None:
    assert of_embedding(3072, 50_000, -1, False) == [] == of_embedding(3072, 50_000)
    assert of_embedding(3073, 50_000) != []
    assert of_embedding(10, 50_000, 0, False) != [], "a row of padding is left out of what is sorted"


@pytest.mark.parametrize(("dtype", "index"), [(torch.int64, 8), (torch.int32, 4)])
def test_sorted_indices_have_a_row_for_each_segment_and_for_each_ten(dtype: torch.dtype, index: int) -> None:
    # 4000 tokens of 1000 rows: at most 1000 segments, and 400 parts of ten more.
    assert of_embedding(4000, 1000, dtype=dtype) == [
        *[4000 * index] * 3, 1000 * 8, 1000 * 8, 1400 * 8, 1400 * 16 * 4,
    ]  # fmt: skip
    assert of_embedding(4000, 9000)[3] == 4000 * 8, "no more segments than tokens"


@pytest.mark.parametrize(
    "func", [aten._index_put_impl_.default, aten.index_put_.default, aten.index_put.default]
)
def test_indexing_that_accumulates_sorts_its_indices(func: Any) -> None:
    target, values = torch.empty(9, 4, device="meta"), torch.empty(5, 4, device="meta")
    indices = [None, torch.empty(5, dtype=torch.int64), torch.empty(1, dtype=torch.int64)]
    assert buffers(func, target, indices, values, True) == [5 * 8] * 4
    assert buffers(func, target, indices, values, accumulate=True) == [5 * 8] * 4
    assert buffers(func, target, indices, values, False) == [] == buffers(func, target, indices, values)
    assert buffers(func, target, [None], values, True) == []
