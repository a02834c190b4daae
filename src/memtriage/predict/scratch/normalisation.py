"""Normalisation: partial sums of the gradients of weight and bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from memtriage.predict.machines import Machine
from memtriage.predict.scratch import reductions

aten: Final = torch.ops.aten

Rule = Callable[[tuple[Any, ...], dict[str, Any], list[torch.Tensor], Machine], list[int]]

MANY_ROWS: Final = 64 * 1024
WARP: Final = 32
ROWS_OF_BLOCK: Final = 32


def _layer_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor], machine: Machine
) -> list[int]:
    """`LaunchGammaBetaBackwardCUDAKernel` in layer_norm_kernel.cu: for many short rows one partial sum for
    each 32 of them, then a plain sum."""
    source, shape = args[1], args[2]
    width = torch.Size(shape).numel()
    rows = source.numel() // max(width, 1)
    gradients = [each for each in outputs if each.numel() == width and each.shape == torch.Size(shape)]
    if rows <= MANY_ROWS or width // WARP >= machine.multiprocessors // 2 or not gradients:
        return []
    blocks = -(-rows // ROWS_OF_BLOCK)
    layout = reductions.layout_of((blocks, width), (width, 1), {0})
    partial = [blocks * width * each.element_size() for each in gradients]
    return [*partial, *reductions.sizes(layout, reductions.SINGLE, machine)]


RULES: Final[dict[Any, Rule]] = {aten.native_layer_norm_backward.default: _layer_norm}
