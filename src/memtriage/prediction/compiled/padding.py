"""Whether Inductor pads a matrix product, which it finds out by running both on the GPU.

Rows that do not begin at multiples of 16 bytes keep cuBLAS from its fast kernels. Padding copies the operands
first (`_should_pad` in torch/_inductor/fx_passes/pad_mm.py, torch 2.11).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from memtriage.prediction.gpu_kinds import GpuKind

_MARGIN: Final = 1.1
"""By how much the padded product must be faster (`is_padded_faster`)."""
_COPIED: Final = 4
"""Bytes that an asynchronous copy into shared memory moves at least (`cp.async`, PTX ISA)."""
_UNALIGNED: Final = 2.0
"""How much longer a product is assumed to take whose rows keep the tensor memory accelerator, which wants
multiples of 16 bytes, from its operands."""
_UNCOPIED: Final = 4.0
"""The same of rows that cannot be copied asynchronously either: an odd number of half-precision elements."""
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
_ACROSS: Final = 4.0
"""How much longer it takes to copy an operand whose columns are contiguous: the copy has contiguous rows."""
_SINGLE: Final = 0.5
"""TF32's rate beside half precision's."""


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A matrix product, or a batch of them.

    Attributes:
        dtype: of the operands.
        batch: how many products there are.
        rows, inner, columns: rows of the left operand, its columns, columns of the right operand.
        added: how much longer each of the three would get.
        made_padded: whether each operand can be made with its padding, instead of being copied.
        in_rows: whether the rows of each operand are contiguous; otherwise its columns are.
    """

    dtype: torch.dtype
    batch: int
    rows: int
    inner: int
    columns: int
    added: tuple[int, ...]
    made_padded: tuple[bool, ...]
    in_rows: tuple[bool, ...]

    def is_worth_timing(self, machine: GpuKind) -> bool:
        """Whether arithmetic bounds it, so that Inductor times it (`is_mm_compute_bound`)."""
        moved = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        if not moved:
            return False
        operations, bandwidth = _rates(machine, self.dtype)
        return self.rows * self.inner * self.columns / moved > _BALANCED * operations / bandwidth

    def is_faster_padded(self, machine: GpuKind) -> bool:
        """Whether padding is assumed to be faster."""
        operations, bandwidth = _rates(machine, self.dtype)
        time = 2 * self.batch * self.rows * self.inner * self.columns / (_REACHED * operations)
        copying = 0.0
        for place in range(2):
            if not self.made_padded[place] and any(self.added[place : place + 2]):
                slower = 1.0 if self.in_rows[place] else _ACROSS
                copying += 2 * self.operands()[place] * slower / bandwidth
        slower = _UNALIGNED if self._aligned() >= _COPIED else _UNCOPIED
        return time * slower > (time + copying) * _MARGIN

    def _aligned(self) -> int:
        """Bytes of which the unaligned lengths are multiples: a power of two."""
        lengths = zip((self.rows, self.inner, self.columns), self.added, strict=True)
        size = int(self.dtype.itemsize)
        return min((math.gcd(length * size, 16) for length, more in lengths if more), default=16)

    def operands(self) -> list[int]:
        """Bytes of the operands."""
        return [self._bytes(self.rows, self.inner), self._bytes(self.inner, self.columns)]

    def result(self) -> int:
        """Bytes of the result."""
        return self._bytes(self.rows, self.columns)

    def padded(self) -> tuple[list[int], list[int]]:
        """Bytes of operands that are padded beforehand; of those that each trial pads, and of its result."""
        rows, inner, columns = (
            length + more
            for length, more in zip((self.rows, self.inner, self.columns), self.added, strict=True)
        )
        sizes = (self._bytes(rows, inner), self._bytes(inner, columns))
        beforehand: list[int] = []
        each: list[int] = []
        for place, size in enumerate(sizes):
            if any(self.added[place : place + 2]):
                (beforehand if self.made_padded[place] else each).append(size)
        return beforehand, [*each, self._bytes(rows, columns)]

    def _bytes(self, rows: int, columns: int) -> int:
        return self.batch * rows * columns * int(self.dtype.itemsize)


def _rates(machine: GpuKind, dtype: torch.dtype) -> tuple[float, float]:
    operations, bandwidth = _RATES[machine.name]
    return (operations * _SINGLE if dtype is torch.float32 else operations), bandwidth
