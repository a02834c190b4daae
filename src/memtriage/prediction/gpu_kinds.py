"""What a prediction must know of a GPU: its architecture, its memory, what lies outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memtriage.model.units import MIB

_GIB: Final = 1 << 30
_THREADS: Final = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
_THREADS_OTHERWISE: Final = 2048
_SHARED_MEMORY: Final = {
    (7, 0): 98304,
    (7, 5): 65536,
    (8, 0): 166912,
    (9, 0): 232448,
    (10, 0): 232448,
}
_SHARED_MEMORY_OTHERWISE: Final = 101376


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A kind of GPU.

    Attributes:
        name: as the driver names it.
        capability: compute capability.
        multiprocessors: streaming multiprocessors.
        memory: bytes that the driver reports in all; where it was not measured, those of the data sheet, of
            which the driver keeps a few hundred MiB.
        outside: bytes that a training process has outside PyTorch's allocator (context, kernels, libraries).
        l2_cache: bytes of the L2 cache.
        measured: whether `memory` and `outside` were measured on this kind; else `outside` is the H200's.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    outside: int
    l2_cache: int
    measured: bool = False

    @property
    def threads_per_multiprocessor(self) -> int:
        """Resident threads that a multiprocessor has room for (CUDA programming guide, table of compute
        capabilities)."""
        return _THREADS.get(self.capability, _THREADS_OTHERWISE)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a block may ask for (CUDA programming guide, table of compute
        capabilities)."""
        return _SHARED_MEMORY.get(self.capability, _SHARED_MEMORY_OTHERWISE)


# One H200 (torch 2.11.0+cu130), 15 training workloads, after three steps: cudaMemGetInfo's total less free
# less the allocator's segments was 751 to 771 MiB; 767 MiB is the median.
_H200_OUTSIDE: Final = 767 * MIB

# Capabilities, multiprocessors and L2 caches: NVIDIA's data sheets and the CUDA programming guide; memory and
# L2 caches of the H200 and the H100: `torch.cuda.get_device_properties` (torch 2.11.0+cu130).
GPU_KINDS: Final[dict[str, GpuKind]] = {
    "h200": GpuKind("NVIDIA H200", (9, 0), 132, 150109880320, _H200_OUTSIDE, 60 * MIB, measured=True),
    "h100": GpuKind("NVIDIA H100 80GB HBM3", (9, 0), 132, 85017493504, _H200_OUTSIDE, 50 * MIB),
    "h100-pcie": GpuKind("NVIDIA H100 PCIe", (9, 0), 114, 80 * _GIB, _H200_OUTSIDE, 50 * MIB),
    "b200": GpuKind("NVIDIA B200", (10, 0), 148, 192 * _GIB, _H200_OUTSIDE, 126 * MIB),
    "a100": GpuKind("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * _GIB, _H200_OUTSIDE, 40 * MIB),
    "a100-40gb": GpuKind("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40 * _GIB, _H200_OUTSIDE, 40 * MIB),
    "a10": GpuKind("NVIDIA A10G", (8, 6), 80, 24 * _GIB, _H200_OUTSIDE, 6 * MIB),
    "l4": GpuKind("NVIDIA L4", (8, 9), 58, 24 * _GIB, _H200_OUTSIDE, 48 * MIB),
    "l40s": GpuKind("NVIDIA L40S", (8, 9), 142, 48 * _GIB, _H200_OUTSIDE, 96 * MIB),
    "rtx4090": GpuKind("NVIDIA GeForce RTX 4090", (8, 9), 128, 24 * _GIB, _H200_OUTSIDE, 72 * MIB),
    "rtx3090": GpuKind("NVIDIA GeForce RTX 3090", (8, 6), 82, 24 * _GIB, _H200_OUTSIDE, 6 * MIB),
    "v100": GpuKind("Tesla V100-SXM2-32GB", (7, 0), 80, 32 * _GIB, _H200_OUTSIDE, 6 * MIB),
    "t4": GpuKind("Tesla T4", (7, 5), 40, 16 * _GIB, _H200_OUTSIDE, 4 * MIB),
}

NO_GPU: Final = GpuKind("no GPU", (9, 0), 132, 0, 0, 0, measured=True)
"""A machine without one, `none`: predictions of the host alone."""


def machine(kind: str) -> GpuKind:
    """The GPU of this name.

    Raises:
        ValueError: when there is none, naming those that there are.
    """
    if kind.lower() == "none":
        return NO_GPU
    kind_of_gpu = GPU_KINDS.get(kind.lower().replace(" ", "").replace("_", "-"))
    if kind_of_gpu is None:
        raise ValueError(f"no GPU kind {kind!r}; expected one of {', '.join(GPU_KINDS)}")
    return kind_of_gpu
