"""Matrix products: the workspaces that cuBLAS keeps, and copies of operands that it cannot read."""

from __future__ import annotations

import os
import re
from typing import Any, Final

import torch

from memtriage.model.units import MIB
from memtriage.prediction.gpu_kinds import GpuKind
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.operators import Args

aten: Final = torch.ops.aten

_KIB: Final = 1 << 10

CUBLAS_WORKSPACE: Final = 8320 * _KIB
"""`:4096:2:16:8`, the default of `CUBLAS_WORKSPACE_CONFIG` (ATen/cuda/CublasHandlePool.cpp)."""
CUBLAS_WORKSPACE_LARGE: Final = 32 * MIB
"""The default on Hopper and Blackwell, as NVIDIA recommends there (same file)."""
CUBLASLT_WORKSPACE: Final = 1 * MIB
"""What cuBLASLt has for itself (pytorch #73328) in the versions before CUBLASLT_UNIFIED_SINCE."""
CUBLASLT_UNIFIED_SINCE: Final = (2, 13)
"""From here on cuBLASLt works in the workspace of cuBLAS (pytorch #181944)."""

PRODUCTS: Final = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.vdot.default,
        aten._addmm_activation.default,
    }
)
WITH_OUT_DTYPE: Final = {
    getattr(packet, overload): packet.default
    for packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
    for overload in ("dtype", "dtype_out")
    if overload in packet.overloads()
}
"""Products of another type than their operands."""
SAME_BUFFERS: Final = {
    getattr(aten, name).out: getattr(aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_addmm_activation")
} | WITH_OUT_DTYPE
"""Products that have the buffers of another, as those into a given tensor: compiled code calls no others."""
SCALED: Final = frozenset({aten._scaled_mm.default, aten._scaled_mm.out})
"""Products of 8-bit operands, which are cuBLASLt (`scaled_gemm`, ATen/cuda/CUDABlas.cpp); not measured."""
_OPERANDS: Final[dict[Any, tuple[int, int]]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten._addmm_activation.default: (1, 2),
}


class Workspaces:
    """One workspace for each handle and stream, one handle for each thread: backward has its own."""

    def __init__(self, machine: GpuKind, version: tuple[int, int], lifetimes: Lifetimes) -> None:
        default = CUBLAS_WORKSPACE_LARGE if machine.data_center else CUBLAS_WORKSPACE
        self._size = configured_size(os.environ.get("CUBLAS_WORKSPACE_CONFIG")) or default
        self._unified = version >= CUBLASLT_UNIFIED_SINCE
        self._lifetimes = lifetimes
        self._kept: dict[tuple[str, bool, int], list[int]] = {}

    def keep(self, func: Any, args: Args) -> None:
        """Notes the workspaces that a product makes where it is the first of its thread."""
        self._keep("cublas", self._size)
        # A bias that is one row goes into the product: `gemm_and_bias`, which is cuBLASLt.
        biased = func is aten.addmm.default and args[0].dim() == 1
        if not self._unified and (biased or func in SCALED):
            self._keep("cublasLt", CUBLASLT_WORKSPACE)

    def _keep(self, library: str, size: int) -> None:
        handle = (library, self._lifetimes.phase == "backward", self._lifetimes.stream)
        if handle not in self._kept:
            self._kept[handle] = self._lifetimes.scratch([size], library)

    def clear(self) -> None:
        """Free them all, as `torch._C._cuda_clearCublasWorkspaces` does; the next products make new ones."""
        for blocks in self._kept.values():
            self._lifetimes.release(blocks)
        self._kept.clear()


def copies(func: Any, args: Args) -> list[int]:
    """Bytes of the operands that are copied before a product."""
    places = _OPERANDS.get(func, ())
    return [args[place].nbytes for place in places if not readable(args[place])]


def configured_size(text: str | None) -> int | None:
    """Bytes that `CUBLAS_WORKSPACE_CONFIG` asks for; None when it is not set.

    >>> configured_size(":4096:8")
    33554432
    """
    pairs = re.findall(r":(\d+):(\d+)", text or "")
    return sum(int(size) * int(count) for size, count in pairs) * _KIB if pairs else None


def readable(matrix: torch.Tensor) -> bool:
    """Whether cuBLAS can read a matrix, or a batch of them, where it lies (`prepare_matrix_for_cublas`)."""
    rows, columns = matrix.shape[-2:]
    down, right = matrix.stride()[-2:]
    reads: bool = (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))
    return reads
