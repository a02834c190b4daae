"""Whether Inductor pads a matrix product, which it finds out by running both on the GPU.

Rows that do not begin at multiples of 16 bytes keep cuBLAS from its fast kernels. Padding copies the operands
first (`_should_pad` in torch/_inductor/fx_passes/pad_mm.py, torch 2.11).
"""

from __future__ import annotations

from typing import Final

import torch

from memtriage.prediction.gpu_kinds import GpuKind

_MARGIN: Final = 1.1
"""By how much the padded product must be faster (`is_padded_faster`)."""
_UNALIGNED: Final = 2.0
"""How much longer an unaligned product is assumed to take."""
_REACHED: Final = 0.7
"""Share of the peak rate that a large product is assumed to reach."""
_BALANCED: Final = 0.5
"""Factor on the machine's balance in `is_mm_compute_bound`."""

_RATES: Final[dict[str, tuple[float, float]]] = {
    "NVIDIA H200": (989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA H100 PCIe": (756e12, 2.0e12),
    "NVIDIA B200": (2250e12, 8.0e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.04e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 1.56e12),
    "NVIDIA A10G": (125e12, 0.6e12),
    "NVIDIA L4": (121e12, 0.3e12),
    "NVIDIA L40S": (362e12, 0.864e12),
    "NVIDIA GeForce RTX 4090": (165e12, 1.01e12),
    "NVIDIA GeForce RTX 3090": (71e12, 0.936e12),
    "Tesla V100-SXM2-32GB": (125e12, 0.9e12),
    "Tesla T4": (65e12, 0.32e12),
}
"""Dense half-precision operations and bytes per second, by NVIDIA's data sheets."""
_SINGLE: Final = 0.5
"""TF32's rate beside half precision's."""


def pays(
    machine: GpuKind,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    added: tuple[int, int, int],
    batch: int,
    free: tuple[bool, bool],
) -> bool:
    """Whether padding is assumed to be faster.

    Args:
        dtype: of the operands.
        sizes: rows of the left operand, its columns, columns of the right operand.
        added: how much longer each would get.
        batch: how many products there are.
        free: whether the operands can be made with their padding, instead of being copied.
    """
    rows, inner, columns = sizes
    operations, bandwidth = _RATES[machine.name]
    if dtype is torch.float32:
        operations *= _SINGLE
    moved = rows * inner + inner * columns + rows * columns
    if rows * inner * columns / moved <= _BALANCED * operations / bandwidth:
        return False
    product = 2 * batch * rows * inner * columns / (_REACHED * operations)
    copied = 0
    if not free[0] and (added[0] or added[1]):
        copied += rows * inner
    if not free[1] and (added[1] or added[2]):
        copied += inner * columns
    padding = 2 * batch * copied * dtype.itemsize / bandwidth
    return bool(product * _UNALIGNED > (product + padding) * _MARGIN)
