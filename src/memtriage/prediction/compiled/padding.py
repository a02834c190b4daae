"""Whether Inductor pads a matrix product, which it finds out by running both on the GPU.

Rows that do not begin at multiples of 16 bytes keep cuBLAS from its fast kernels. Padding copies the operands
first (`_should_pad` in torch/_inductor/fx_passes/pad_mm.py, torch 2.11).

Known limitations: both times are estimated. `Paddings.remark` names the products whose outcome depends on how
slow the unaligned kernels really are. Where memory bounds a product, an H100 leaves five of the six of ViT's
attention as they are, and in one of two runs padded the sixth, both of whose operands have unaligned rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from memtriage.model.units import size as in_words
from memtriage.prediction.gpu_kinds import GpuKind

_MARGIN: Final = 1.1
"""By how much the padded product must be faster (`is_padded_faster`)."""
_KERNEL: Final = 3e-6
"""Seconds that the shortest kernel takes."""
_KERNELS_OF_COPY: Final = 2
"""Kernels that pad an operand: `constant_pad_nd` fills, then copies."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer a product takes whose rows are not aligned to 16 bytes: assumed, and its bounds."""

    least: float
    assumed: float
    most: float


_SLOWDOWNS: Final = {
    8: Slowdown(1.4, 2.0, 2.7),
    4: Slowdown(1.6, 2.0, 2.7),
    2: Slowdown(2.8, 3.2, 8.0),
}
"""By the bytes of which all unaligned lengths are multiples.

The tensor memory accelerator wants 16 bytes; asynchronous copies into shared memory (`cp.async`, PTX ISA)
move at least 4. Beyond the bounds of 4 and 2 bytes, products of GPT-2, with a vocabulary of 50,257, would be
decided otherwise than an H200 did. At 2 bytes an H100 pads the gradient of its embedding if it is 1,024 wide,
not if it is 768 wide: the slowdown is between 2.9 and 3.5. At 8 bytes Ampere's kernels run, at most 0.7 of
Hopper's rate.
"""
_REACHED: Final = 0.7
"""Share of the peak rate that a large product is assumed to reach."""
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

    def is_faster_padded(self, machine: GpuKind) -> bool:
        """Whether padding is assumed to be faster: unaligned rows slow the arithmetic, not the memory."""
        return self._pays(machine, self._slowdown().assumed, 1.0)

    def is_sure(self, machine: GpuKind) -> bool:
        """Whether the outcome is the same at both bounds of the slowdown, which memory may share."""
        slowdown = self._slowdown()
        least = self._pays(machine, slowdown.least, 1.0)
        return least == self._pays(machine, slowdown.most, slowdown.most)

    def _pays(self, machine: GpuKind, arithmetic: float, memory: float) -> bool:
        """Whether padding is faster if arithmetic and memory take so many times longer unaligned."""
        operations, bandwidth = _rates(machine, self.dtype)
        calculating = 2 * self.batch * self.rows * self.inner * self.columns / (_REACHED * operations)
        moving = (sum(self.operands()) + self.result()) / bandwidth
        copying = 0.0
        for place, operand in enumerate(self.operands()):
            if not self.made_padded[place] and self._is_lengthened(place):
                slower = 1.0 if self.in_rows[place] else _ACROSS
                copying += 2 * operand * slower / bandwidth + _KERNELS_OF_COPY * _KERNEL
        unaligned = max(calculating * arithmetic, moving * memory) + _KERNEL
        padded = max(calculating, moving) + _KERNEL + copying
        return unaligned > padded * _MARGIN

    def at_stake(self) -> int:
        """Bytes by which a wrong guess changes a peak: a padded copy of an operand, or a longer result."""
        _, (*copies, result) = self.padded()
        return max([*copies, result - self.result()])

    def _slowdown(self) -> Slowdown:
        lengths = zip((self.rows, self.inner, self.columns), self.added, strict=True)
        size = int(self.dtype.itemsize)
        return _SLOWDOWNS[min((math.gcd(length * size, 16) for length, more in lengths if more), default=8)]

    def _is_lengthened(self, place: int) -> bool:
        return any(self.added[place : place + 2])

    def operands(self) -> list[int]:
        """Bytes of the operands."""
        return [self._bytes(self.rows, self.inner), self._bytes(self.inner, self.columns)]

    def result(self) -> int:
        """Bytes of the result."""
        return self._bytes(self.rows, self.columns)

    def padded(self) -> tuple[list[int], list[int]]:
        """Bytes of operands that are padded beforehand; of those that each trial pads, and of its result."""
        lengths = zip((self.rows, self.inner, self.columns), self.added, strict=True)
        rows, inner, columns = (length + more for length, more in lengths)
        sizes = (self._bytes(rows, inner), self._bytes(inner, columns))
        beforehand: list[int] = []
        each: list[int] = []
        for place, size in enumerate(sizes):
            if self._is_lengthened(place):
                (beforehand if self.made_padded[place] else each).append(size)
        return beforehand, [*each, self._bytes(rows, columns)]

    def _bytes(self, rows: int, columns: int) -> int:
        return self.batch * rows * columns * int(self.dtype.itemsize)

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{batch}[{self.rows}, {self.inner}] @ [{self.inner}, {self.columns}] {kind}"


class Paddings:
    """Decides about the matrix products of a program, each once."""

    def __init__(self, machine: GpuKind) -> None:
        self._machine = machine
        self._decided: dict[MatrixProduct, bool] = {}

    def known(self, product: MatrixProduct) -> bool:
        """Whether it is decided already: Inductor times it once."""
        return product in self._decided

    def is_padded(self, product: MatrixProduct) -> bool:
        """Whether Inductor is assumed to pad it."""
        if product not in self._decided:
            self._decided[product] = product.is_faster_padded(self._machine)
        return self._decided[product]

    def remark(self) -> str | None:
        """What is not sure, in words; None where all is."""
        unsure = [product for product in self._decided if not product.is_sure(self._machine)]
        if not unsure:
            return None
        largest = max(unsure, key=MatrixProduct.at_stake)
        many = f"{len(unsure)} matrix products" if len(unsure) > 1 else "a matrix product"
        return (
            f"Inductor pads {many} if that proves faster on the GPU, which is not sure; the largest, "
            f"{largest}, is assumed to be {'padded' if self._decided[largest] else 'left as it is'}: "
            f"otherwise a peak may differ by {in_words(largest.at_stake())}"
        )


def _rates(machine: GpuKind, dtype: torch.dtype) -> tuple[float, float]:
    single = dtype is torch.float32
    return machine.operations * (_SINGLE if single else 1), machine.bandwidth
