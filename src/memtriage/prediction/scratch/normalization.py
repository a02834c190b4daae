"""Normalization: partial sums of the gradients of weight and bias."""

from __future__ import annotations

from typing import Any, Final

import torch

from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.scratch import reductions
from memtriage.prediction.scratch.stages import Rule

aten: Final = torch.ops.aten


MANY_ROWS: Final = 64 * 1024
WARP: Final = 32
ROWS_OF_BLOCK: Final = 32


def _layer_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], machine: GpuKind
) -> list[int]:
    """`LaunchGammaBetaBackwardCUDAKernel` in layer_norm_kernel.cu: for many short rows one partial sum for
    each 32 of them, then a plain sum."""
    source, shape = args[1], args[2]
    width = torch.Size(shape).numel()
    rows = source.numel() // max(width, 1)
    gradients = [
        tensor for tensor in outputs if tensor.numel() == width and tensor.shape == torch.Size(shape)
    ]
    if rows <= MANY_ROWS or width // WARP >= machine.multiprocessors // 2 or not gradients:
        return []
    blocks = -(-rows // ROWS_OF_BLOCK)
    layout = reductions.layout_of((blocks, width), (width, 1), {0})
    partial = [blocks * width * gradient.element_size() for gradient in gradients]
    return [*partial, *reductions.sizes(layout, reductions.SINGLE, machine)]


RULES: Final[dict[Any, Rule]] = {aten.native_layer_norm_backward.default: _layer_norm}
