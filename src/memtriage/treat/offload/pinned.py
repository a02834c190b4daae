"""Host memory of exactly the requested size: anonymous mappings, page-locked for CUDA if wanted.

PyTorch's pinned allocator rounds each block up to a power of two and never frees it. A private anonymous
mapping that is registered with the driver takes its size, rounded up to pages, and copies as fast.
"""

from __future__ import annotations

import mmap
import os
import sys
import warnings
from typing import Final, TypeVar

import torch
from torch import Tensor

from memtriage.model.units import size

_PORTABLE: Final = 1
"""`cudaHostRegisterPortable`: pinned for every device of the process, not only for the current one."""

_Mapping = TypeVar("_Mapping", bound=mmap.mmap)


class PinningFailed(RuntimeWarning):
    """Page-locking was refused: copies work, but do not overlap with other work."""


def host_memory(nbytes: int) -> Tensor:
    """`nbytes` zero bytes as a one-dimensional tensor, on separate pages that the first write commits.

    The memory returns to the system when the last tensor that views it dies.

    Raises:
        MemoryError: the system refuses the mapping.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # The tensor keeps the mapping alive. Closing the mapping by hand would unmap it while the tensor uses it.
    return torch.frombuffer(_mapping(mmap.mmap, nbytes), dtype=torch.uint8)


def _mapping(kind: type[_Mapping], nbytes: int) -> _Mapping:
    try:
        mapping = kind(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refused {size(nbytes)} of host memory: {error}") from error
    # Fewer faults on the first step; advice only, some kernels have no huge pages.
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass
    return mapping


class _LockedMapping(mmap.mmap):
    """A mapping that unregisters itself before its pages are unmapped."""

    address: int
    pid = 0

    def __del__(self) -> None:
        # At the end of the program the driver, with its registrations, may be gone already.
        if self.pid == os.getpid() and not sys.is_finalizing():
            torch.cuda.synchronize()  # a copy may still be under way
            torch.cuda.cudart().cudaHostUnregister(self.address)


def locked_memory(nbytes: int) -> Tensor | None:
    """`nbytes` zero bytes, page-locked for CUDA until the last tensor that views them dies.

    For tensors that nobody closes; use `PinnedMemory` for those that have an owner.

    Args:
        nbytes: at least 1.

    Returns:
        A one-dimensional tensor of `torch.uint8`; None, after a `PinningFailed` warning, if the driver
        refused.

    Raises:
        MemoryError: the system refuses the mapping.
    """
    mapping = _mapping(_LockedMapping, nbytes)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if not _register(memory):
        return None
    mapping.address, mapping.pid = memory.data_ptr(), os.getpid()
    return memory


class PinnedMemory:
    """One exact run of host memory that CUDA can copy from and to while the CPU does other work.

    Attributes:
        bytes: the memory, a one-dimensional tensor of `torch.uint8`.
        pinned: whether it is page-locked. False if no CUDA device is used or, after a `PinningFailed`
            warning, if the driver refused.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        """Map `nbytes` and, with `pin`, register them with the CUDA driver.

        Raises:
            MemoryError: when the system refuses the mapping.
        """
        self.bytes = host_memory(nbytes)
        self._owner_pid = os.getpid()
        self.pinned = pin and _register(self.bytes)

    def close(self) -> None:
        """Unregister; the memory is freed with its last tensor. No copy may be running. Repeatable."""
        # A forked child does not share the registration, and cannot call CUDA.
        if self.pinned and os.getpid() == self._owner_pid:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        self.pinned = False


def _register(memory: Tensor) -> bool:
    # The driver would commit missing pages one by one; writing first is faster.
    memory.zero_()
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))
    if status == 0:
        return True
    # Clear the error of a refused registration, which the next kernel launch would raise. Torch clears
    # the driver's error when it raises it: so launch a harmless kernel and drop the exception.
    try:
        torch.ones(1, device="cuda")
    except RuntimeError:
        pass
    warnings.warn(
        f"the CUDA driver refused to page-lock {size(memory.numel())} of host memory (cudaError {status}); "
        "copies to and from the GPU will be slower and overlap with nothing. "
        "Usual reasons: a limit on locked memory (`ulimit -l`), or too little free host memory.",
        PinningFailed,
        stacklevel=2,
    )
    return False
