"""Kernels that read contiguous memory only, and copy what lies otherwise."""

from __future__ import annotations

from typing import Any, Final

import torch

aten: Final = torch.ops.aten

CONTIGUOUS: Final[dict[Any, tuple[int, ...]]] = {
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (0, 1),
    aten.native_group_norm.default: (0,),
    aten.native_group_norm_backward.default: (0, 1),
    aten._softmax.default: (0,),
    aten._log_softmax.default: (0,),
    aten._softmax_backward_data.default: (0, 1),
    aten._log_softmax_backward_data.default: (0, 1),
    aten.embedding_dense_backward.default: (0,),
    aten.sort.default: (0,),
    aten.sort.stable: (0,),
    aten.topk.default: (0,),
}
"""Positions of the arguments that are made contiguous, in layer_norm_kernel.cu, group_norm_kernel.cu,
SoftMax.cu, Embedding.cu, Sort.cpp and TensorTopK.cu of ATen/native/cuda."""


def buffers(func: Any, args: tuple[Any, ...]) -> list[int]:
    """Bytes of each copy."""
    return [
        args[place].numel() * args[place].element_size()
        for place in CONTIGUOUS.get(func, ())
        if not args[place].is_contiguous()
    ]
