"""Gradients of embeddings and of indexing: sorted copies of the indices, partial sums."""

from __future__ import annotations

from typing import Any, Final

import torch

from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.operators import Args, Kwargs
from memtriage.prediction.scratch.stages import Rule, Tensors

aten: Final = torch.ops.aten


UNSORTED_INDICES: Final = 3072
"""Up to so many indices an embedding's gradient is summed without sorting them (Embedding.cu)."""
ROWS_PER_THREAD: Final = 10
"""`NROWS_PER_THREAD` in EmbeddingBackwardKernel.cu."""
_INDEX: Final = 8
_SINGLE: Final = 4


def _embedding(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """`embedding_dense_backward`: indices sorted with their places, then one partial row a segment."""
    gradient, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    padding = args[3] if len(args) > 3 else -1
    if count <= UNSORTED_INDICES and padding < 0:
        return []
    index = indices.element_size()
    sorting = [count * index, count * index, count * index]
    segments = min(count, rows)
    partial = count // ROWS_PER_THREAD + segments
    width = gradient.shape[-1]
    return [*sorting, segments * _INDEX, segments * _INDEX, partial * _INDEX, partial * width * _SINGLE]


def _index_put(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """`index_put_` that accumulates sorts the linear indices (`index_put_with_sort_kernel`)."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [arg for arg in args[1] if arg is not None]
    if not accumulate or not indices:
        return []
    count = max(index.numel() for index in indices)
    return [count * _INDEX] * 4


RULES: Final[dict[Any, Rule]] = {
    aten.embedding_dense_backward.default: _embedding,
    aten._index_put_impl_.default: _index_put,
    aten.index_put_.default: _index_put,
    aten.index_put.default: _index_put,
}
