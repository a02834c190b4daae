"""What to say of host memory that is wasted or runs short: why it happens, and what to do."""

from __future__ import annotations

from typing import Final

from memtriage.model.units import size

RETENTION: Final = (
    "freed memory stays with the C library: after the first large block is freed, malloc serves blocks up to "
    "32 MiB from its heap, where one survivor keeps all below it resident"
)
COPY_ON_WRITE: Final = (
    "forked workers share the parent's pages until one side writes to them, and reading a Python object "
    "writes its reference count: each worker ends with a copy of its own"
)
SHARE_DATA: Final = (
    "keep the data set in a few large arrays (numpy, torch, Arrow; strings as one byte array with offsets) "
    "or in a memory-mapped file, or use fewer workers"
)
SHARED_MEMORY: Final = (
    "batches from loader workers and share_memory_() tensors are in /dev/shm, which has a size limit of its "
    "own; a write that exceeds it ends the process with a bus error"
)
MORE_SHARED_MEMORY: Final = (
    "give the container more (`docker run --shm-size=8g`, in Kubernetes an emptyDir of medium Memory), or "
    "lower num_workers, prefetch_factor or the batch size; "
    "torch.multiprocessing.set_sharing_strategy('file_system') does not help: it uses the same space"
)
HOST_LIMIT: Final = (
    "host memory is nearly used up: beyond the limit the kernel kills a process of the group (exit "
    "status 137); it may swap before that"
)
HOLD_LESS: Final = (
    "hold less in host memory: fewer or leaner loader workers, smaller prefetch, less pinned memory, "
    "memtriage.OffloadedAdamW for offloaded optimizers (12 bytes per parameter); or raise the limit"
)
PINNED_ROUNDING: Final = (
    "torch's allocator of page-locked memory rounds each block up to a power of two and keeps freed blocks "
    "for good"
)
_ANY_VERSION: Final = (
    "pin buffers whose size is a power of two, or none (pin_memory=False); or register exact memory with the "
    "driver instead, as memtriage.OffloadedAdamW does, and memtriage.deepspeed_exact_host_memory() for "
    "DeepSpeed (cudaHostRegister on a mapping costs its own size and copies as fast)"
)


def trim(idle: int) -> str:
    """Return what to do about bytes that malloc keeps idle."""
    return (
        "call memtriage.malloc_trim() where a phase ends (after loading, after evaluation): it returns "
        f"{size(idle)} that no step takes again; or start with `memtriage run --host-tuning`"
    )


def pinned_remedy(torch_version: str) -> str:
    """What is safe against rounding on a version of torch.

    2.13 brought two settings. Until 2.14.1 `get_free_block` takes the last block of a size class unseen
    (pytorch #192722): where unrounded blocks are cached, a request may get a block that is too small and
    overwrite the heap. So below 2.14.1 only the limit on cached sizes is named: blocks above it are neither
    rounded nor cached. The limit on rounding alone leaves caching unlimited and is never proposed there.
    """
    numbers = [int(part) for part in torch_version.partition("+")[0].split(".") if part.isdigit()]
    version = (*numbers, 0, 0, 0)[:3]
    if version < (2, 13, 0):
        return f"this torch has no setting against it: {_ANY_VERSION}"
    if version < (2, 14, 1):
        return (
            "start with PYTORCH_CUDA_ALLOC_CONF=pinned_max_cached_size_mb:64 and no other pinned_ setting: "
            "larger blocks are then neither rounded nor kept, and each pays a fresh page-lock; do not set a "
            f"limit on rounding with this torch (pytorch #192722 corrupts memory); or {_ANY_VERSION}"
        )
    return (
        "start with PYTORCH_CUDA_ALLOC_CONF=pinned_max_round_threshold_mb:64: larger blocks keep their exact "
        f"size; or {_ANY_VERSION}"
    )
