"""What a prediction must know of a GPU: its architecture, its memory, what lies outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from memtriage.model.units import GIB, MIB
from memtriage.observe.driver import first_device_name

MEASURED: Final = "h200"
"""The kind of GPU that predictions were measured on."""

# One H200 (torch 2.11.0+cu130), 15 training workloads, after three steps: cudaMemGetInfo's total less free
# less the allocator's segments was 751 to 771 MiB; 767 MiB is the median.
_H200_OUTSIDE: Final = 767 * MIB
_PER_CAPABILITY: Final = {
    (7, 0): (2048, 98304),
    (7, 5): (1024, 65536),
    (8, 0): (2048, 166912),
    (8, 6): (1536, 101376),
    (8, 9): (1536, 101376),
    (9, 0): (2048, 232448),
    (10, 0): (2048, 232448),
    (10, 3): (2048, 232448),
    (12, 0): (1536, 101376),
    (12, 1): (1536, 101376),
}
"""Resident threads of a multiprocessor, and bytes of shared memory that a block may ask for (CUDA programming
guide, table of compute capabilities)."""


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A kind of GPU.

    Attributes:
        name: as the driver names it.
        capability: compute capability.
        multiprocessors: streaming multiprocessors.
        memory: bytes that the driver reports in all; where it was not measured, those of the data sheet, of
            which the driver keeps a few hundred MiB.
        l2_cache: bytes of the L2 cache.
        operations: dense half-precision operations per second.
        bandwidth: bytes per second of its memory.
        outside: bytes that a training process has outside PyTorch's allocator (context, kernels, libraries).
        measured: whether `memory` and `outside` were measured on this kind; else `outside` is the H200's.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    l2_cache: int
    operations: float
    bandwidth: float
    outside: int = _H200_OUTSIDE
    measured: bool = False

    @property
    def threads_per_multiprocessor(self) -> int:
        """Resident threads that a multiprocessor has room for."""
        return _PER_CAPABILITY[self.capability][0]

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a block may ask for."""
        return _PER_CAPABILITY[self.capability][1]

    @property
    def tensor_cores(self) -> bool:
        """Whether it multiplies half precision on tensor cores (Volta)."""
        return self.capability >= (7, 0)

    @property
    def bfloat16(self) -> bool:
        """Whether it has bfloat16, TF32 and the kernels of flash attention (Ampere)."""
        return self.capability >= (8, 0)

    @property
    def data_center(self) -> bool:
        """Whether it is a Hopper or Blackwell of a data center."""
        return self.capability[0] in (9, 10)

    @property
    def consumer(self) -> bool:
        """Whether it has the smaller shared memory of consumer cards since Ampere."""
        return (8, 6) <= self.capability <= (8, 9) or self.capability >= (12, 0)


# NVIDIA's data sheets and the CUDA programming guide; memory and L2 caches of the H200 and the H100:
# `torch.cuda.get_device_properties` (torch 2.11.0+cu130).
GPU_KINDS: Final[dict[str, GpuKind]] = {
    "h200": GpuKind("NVIDIA H200", (9, 0), 132, 150109880320, 60 * MIB, 989e12, 4.8e12, measured=True),
    "h100": GpuKind("NVIDIA H100 80GB HBM3", (9, 0), 132, 85017493504, 50 * MIB, 989e12, 3.35e12),
    "h100-pcie": GpuKind("NVIDIA H100 PCIe", (9, 0), 114, 80 * GIB, 50 * MIB, 756e12, 2.0e12),
    "b200": GpuKind("NVIDIA B200", (10, 0), 148, 192 * GIB, 126 * MIB, 2250e12, 8.0e12),
    "a100": GpuKind("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * GIB, 40 * MIB, 312e12, 2.04e12),
    "a100-40gb": GpuKind("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40 * GIB, 40 * MIB, 312e12, 1.56e12),
    "a10": GpuKind("NVIDIA A10G", (8, 6), 80, 24 * GIB, 6 * MIB, 125e12, 0.6e12),
    "l4": GpuKind("NVIDIA L4", (8, 9), 58, 24 * GIB, 48 * MIB, 121e12, 0.3e12),
    "l40s": GpuKind("NVIDIA L40S", (8, 9), 142, 48 * GIB, 96 * MIB, 362e12, 0.864e12),
    "rtx4090": GpuKind("NVIDIA GeForce RTX 4090", (8, 9), 128, 24 * GIB, 72 * MIB, 165e12, 1.01e12),
    "rtx3090": GpuKind("NVIDIA GeForce RTX 3090", (8, 6), 82, 24 * GIB, 6 * MIB, 71e12, 0.936e12),
    "v100": GpuKind("Tesla V100-SXM2-32GB", (7, 0), 80, 32 * GIB, 6 * MIB, 125e12, 0.9e12),
    "t4": GpuKind("Tesla T4", (7, 5), 40, 16 * GIB, 4 * MIB, 65e12, 0.32e12),
}

NO_GPU: Final = GpuKind("no GPU", (9, 0), 132, 0, 0, 989e12, 4.8e12, outside=0, measured=True)
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


def gpu_here() -> str:
    """The kind of the first GPU of this machine; `MEASURED` where there is none, or none that is known."""
    name = first_device_name()
    return next((key for key, kind in GPU_KINDS.items() if kind.name == name), MEASURED)
