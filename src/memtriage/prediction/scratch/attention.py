"""Attention kernels: accumulators in single precision, expanded heads, sums of products."""

from __future__ import annotations

from typing import Any, Final

import torch

from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.operators import Args, Kwargs
from memtriage.prediction.scratch.stages import Rule, Tensors

aten: Final = torch.ops.aten


FLASH_ROWS: Final = 128
"""Lengths are rounded up to it (`round_multiple(seqlen_q, 128)`, flash_attn/flash_api.cpp)."""
FLASH_HEAD_STEP: Final = 32
FLASH_NARROW: Final = 128
"""Wider heads are rounded up to twice the step."""
EFFICIENT_IN_REGISTERS: Final = 128
"""Widest head whose results stay in registers (`kMaxK` of the kernels that keep them there)."""
EFFICIENT_TILE: Final = 64
"""Rows and columns of a tile of the memory-efficient backward."""
EFFICIENT_TILE_HEAD: Final = 4
"""Elements before a tile: a lock, a counter and padding (`GradQTempStorage`)."""
_SINGLE: Final = 4


def _flash_backward(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """`mha_bwd`: the gradient of the queries and the row sums in single precision; for grouped heads the
    gradients of keys and values for every head of the queries."""
    query, key = args[1], args[2]
    batch, heads, length, _ = query.shape
    rows = batch * heads * (-(-length // FLASH_ROWS) * FLASH_ROWS)
    return [rows * _SINGLE, *_flash_accumulators(rows, query, key, heads // key.shape[1])]


def _package_backward(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """The same of the package flash-attn (2.8), whose heads come after the length. The row sums are its
    result (`mha_bwd`, `mha_varlen_bwd` in csrc/flash_attn/flash_api.cpp)."""
    query, key = args[1], args[2]
    if query.dim() == 3:
        # Packed: rows of all inputs, and a tile for each.
        total, heads, _ = query.shape
        inputs = args[9].numel() - 1
        rows = (total + FLASH_ROWS * inputs) * heads
    else:
        batch, length, heads, _ = query.shape
        rows = batch * heads * (-(-length // FLASH_ROWS) * FLASH_ROWS)
    return _flash_accumulators(rows, query, key, heads // key.shape[-2])


def _flash_accumulators(rows: int, query: torch.Tensor, key: torch.Tensor, shared: int) -> list[int]:
    """The gradient of so many rows of queries; where heads share keys, gradients of these for each head."""
    size = query.shape[-1]
    step = FLASH_HEAD_STEP if size <= FLASH_NARROW else 2 * FLASH_HEAD_STEP
    buffers = [rows * -(-size // step) * step * _SINGLE]
    if shared > 1:
        expanded = key.numel() * shared * key.element_size()
        buffers += [expanded, expanded]
    return buffers


def _cudnn_backward(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """cudnn-frontend's `CompositeSDPABackwardNode`: the gradient of the queries and the row sums in single
    precision, gradients of grouped keys and values for every head."""
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    total = batch * heads * length * (size + 1) * _SINGLE
    if key.shape[1] != heads:
        total += 2 * batch * heads * key.shape[2] * size * key.element_size()
    return [total]


def _efficient_forward(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """`kNeedsOutputAccumulatorBuffer` (mem_eff_attention/kernel_forward.h): heads too wide for registers."""
    query, value = args[0], args[2]
    batch, heads, length, _ = query.shape
    if value.shape[-1] <= EFFICIENT_IN_REGISTERS or query.dtype is torch.float32:
        return []
    return [batch * heads * length * value.shape[-1] * _SINGLE]


def _efficient_backward(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """Sums of gradient times output; for half precision the gradients in single precision, tile by tile
    (`workspace_size`, mem_eff_attention/kernel_backward.h)."""
    query, key, value = args[1], args[2], args[3]
    batch, heads, length, size = query.shape
    sums = batch * heads * length * _SINGLE
    if query.dtype is torch.float32:
        return [batch * heads * length * value.shape[-1] * _SINGLE, sums]
    tile = EFFICIENT_TILE
    tiles = -(-length // tile) * -(-size // tile)
    elements = tiles * (tile * tile + EFFICIENT_TILE_HEAD)
    if max(size, value.shape[-1]) > EFFICIENT_IN_REGISTERS:
        rows = -(-key.shape[2] // tile) * tile
        elements += rows * sum(-(-width // tile) * tile for width in (size, value.shape[-1]))
    return [batch * heads * elements * _SINGLE, sums]


def _safe_softmax(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """`_safe_softmax`: which scores are minus infinity, which rows have no others, and a zero for these; as
    recorded on an H200 (torch 2.11), the softmax itself is filled with it."""
    scores = args[0]
    return [scores.numel(), scores.numel() // max(scores.shape[-1], 1), outputs[0].element_size()]


def _softmax_backward(args: Args, kwargs: Kwargs, outputs: Tensors, machine: GpuKind) -> list[int]:
    """`softmax_backward_cuda_out` (SoftMax.cu): gradient times output, in full. Measured with eager
    attention on an H200 (torch 2.11): a tensor of scores in float32, to the byte."""
    return [args[0].nbytes]


RULES: Final[dict[Any, Rule]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
}

OF_PACKAGES: Final[dict[str, Rule]] = dict.fromkeys(
    ("flash_attn::_flash_attn_backward", "flash_attn::_flash_attn_varlen_backward"), _package_backward
)
"""Operators that are there once a package is imported."""
