"""Which attention kernel `scaled_dot_product_attention` runs on a GPU.

The order and the conditions are those of `sdp::select_sdp_backend` (torch 2.8 to 2.14,
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

from memtriage.prediction.gpu_kinds import GpuKind

FLASH_HEAD_LIMIT: Final = 256
CUDNN_HEAD_LIMIT: Final = 128
HALVES: Final = (torch.float16, torch.bfloat16)
CUDNN_DROPOUT_STEP: Final = 16
"""cuDNN knows dropout probabilities in sixteenths (`check_cudnn_dropout`)."""
CUDNN_FIRST_SINCE: Final = (2, 10)
"""Before it, cuDNN came first only where `TORCH_CUDNN_SDPA_PREFERRED` asked for it."""
CUDNN_DROPOUT_CHECKED_SINCE: Final = (2, 14)
EFFICIENT_GQA_SINCE: Final = (2, 14)


class Backend(Enum):
    """The kernels, by the names of `torch.nn.attention.SDPBackend`."""

    MATH = "math"
    FLASH = "flash attention"
    EFFICIENT = "memory-efficient attention"
    CUDNN = "cuDNN attention"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What the choice depends on. Shapes are (batch, heads, length, head size)."""

    dtype: torch.dtype
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    strides_end_in_one: bool
    masked: bool
    mask_dim: int
    mask_needs_grad: bool
    dropout: float
    causal: bool
    gqa: bool
    needs_grad: bool


@dataclass(frozen=True, slots=True)
class Switches:
    """What the program allows (`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`)."""

    flash: bool = True
    efficient: bool = True
    math: bool = True
    cudnn: bool = True
    deterministic: bool = False
    order: tuple[Backend, ...] | None = None


def choose(call: AttentionCall, machine: GpuKind, version: tuple[int, int], switches: Switches) -> Backend:
    """The kernel that runs.

    Raises:
        RuntimeError: the program allows no kernel that can run this call, as on the GPU.
    """
    for backend in switches.order or default_order(machine, version):
        if backend is Backend.CUDNN and switches.cudnn and _cudnn(call, machine, version, switches):
            return backend
        if backend is Backend.FLASH and switches.flash and _flash(call, machine):
            return backend
        if backend is Backend.EFFICIENT and switches.efficient and _efficient(call, machine, version):
            return backend
        if backend is Backend.MATH and switches.math:
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def default_order(machine: GpuKind, version: tuple[int, int]) -> tuple[Backend, ...]:
    """`priority_order`: cuDNN comes first on data-center Hopper and Blackwell with cuDNN after 9.15."""
    rest = (Backend.FLASH, Backend.EFFICIENT, Backend.MATH)
    if machine.data_center and version >= CUDNN_FIRST_SINCE:
        return (Backend.CUDNN, *rest)
    return (*rest, Backend.CUDNN)


def _dense(call: AttentionCall, same_key_value_heads: bool) -> bool:
    """`check_batch_size_and_num_heads_dense` and `check_nonzero_sequence_lengths_dense`."""
    if len(call.query) != 4 or not (call.query[0] == call.key[0] == call.value[0]):
        return False
    heads, key_heads, value_heads = call.query[1], call.key[1], call.value[1]
    if call.gqa:
        if same_key_value_heads and key_heads != value_heads:
            return False
        if not key_heads or not value_heads or heads % key_heads or heads % value_heads:
            return False
    elif not heads == key_heads == value_heads:
        return False
    return call.query[2] > 0 and call.key[2] > 0 and call.strides_end_in_one


def _flash(call: AttentionCall, machine: GpuKind) -> bool:
    size = call.query[-1]
    if call.masked or call.dtype not in HALVES or not machine.bfloat16:
        return False
    if size > FLASH_HEAD_LIMIT or not size == call.key[-1] == call.value[-1]:
        return False
    if call.needs_grad and machine.consumer and size > 192 and (size <= 224 or call.dropout > 0):
        return False
    if call.causal and call.query[-2] != call.key[-2]:
        return False
    return _dense(call, same_key_value_heads=True)


def _efficient(call: AttentionCall, machine: GpuKind, version: tuple[int, int]) -> bool:
    if call.gqa and version < EFFICIENT_GQA_SINCE:
        return False
    half = call.dtype in HALVES
    if not half and call.dtype is not torch.float32:
        return False
    if call.dtype is torch.bfloat16 and not machine.bfloat16:
        return False
    alignment = max(4, 128 // (16 if half else 32)) if machine.bfloat16 else (8 if half else 1)
    if call.query[-1] != call.key[-1] or call.query[-1] % alignment or call.value[-1] % alignment:
        return False
    return _dense(call, same_key_value_heads=True)


def _cudnn(call: AttentionCall, machine: GpuKind, version: tuple[int, int], switches: Switches) -> bool:
    if switches.deterministic or call.dtype not in HALVES or not machine.bfloat16:
        return False
    if call.masked and (call.mask_needs_grad or call.mask_dim not in (2, 4)):
        return False
    sizes = (call.query[-1], call.value[-1])
    if max(sizes) > CUDNN_HEAD_LIMIT or any(size % 8 for size in sizes):
        return False
    if call.key[-2] == 1 or (call.dropout and call.query[-2] == 1):
        return False
    steps = call.dropout * CUDNN_DROPOUT_STEP
    if version >= CUDNN_DROPOUT_CHECKED_SINCE and steps != int(steps):
        return False
    return _dense(call, same_key_value_heads=False)
