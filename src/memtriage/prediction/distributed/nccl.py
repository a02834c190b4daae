"""What NCCL holds on the device: outside PyTorch's allocator, and of DDP's buckets."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from memtriage.model.units import count, size

# Two H200s of one host (NVLink; torch 2.11.0+cu130, NCCL 2.28.9), cudaMemGetInfo's total less free less the
# allocator's segments, after all-reduce, all-gather, reduce-scatter and broadcast: 862 MiB more with the
# first communicator, then 486 and 484 MiB more with the second and the third.
COMMUNICATOR: Final = 485 << 20
"""Bytes of one communicator: the buffers of its connections. It depends on NCCL's version, its channels and
its transports: others report 544 to 688 MB (nccl #964, sglang #30908), and up to gigabytes across hosts (nccl
#864, #1685)."""
LIBRARY: Final = 377 << 20
"""Bytes that the first communicator takes beyond its own: NCCL's kernels."""
# One H200 (same versions), DDP of one rank: 560 MiB more with the first communicator, then 388 and 390.
ALONE: Final = 389 << 20
"""Bytes of the communicator of one rank, which connects to no other."""
LIBRARY_ALONE: Final = 171 << 20
"""Bytes that the first one takes beyond its own: it runs none of NCCL's kernels."""


def outside(communicators: Collection[int]) -> int:
    """Bytes outside the allocator, for communicators of so many ranks each."""
    connected = _connected(communicators)
    library = (LIBRARY if connected else LIBRARY_ALONE) if communicators else 0
    return library + connected * COMMUNICATOR + (len(communicators) - connected) * ALONE


def _connected(communicators: Collection[int]) -> int:
    return sum(ranks > 1 for ranks in communicators)


def notes(world_size: int, communicators: Collection[int], held: int) -> list[str]:
    """What is assumed of a job of many ranks.

    Args:
        communicators: how many ranks each has.
        held: bytes of DDP's first bucket, where another has replaced it.
    """
    connected = _connected(communicators)
    if world_size > 1 and not connected:
        return [f"world_size={world_size}, but the ranks do not communicate: each is predicted alone"]
    if not communicators:
        return []
    if not connected:
        return [
            f"NCCL is taken to hold {size(outside(communicators))} outside the allocator for "
            f"{count(len(communicators), 'communicator')} of one rank: measured on an H200"
        ]
    notes_made = [
        f"NCCL is taken to hold {size(LIBRARY)} outside the allocator and {size(COMMUNICATOR)} more for each "
        f"communicator, of which there {'is' if connected == 1 else 'are'} {connected}: measured on "
        "two H200s of one host; more ranks, another network or another version may take more"
    ]
    if held:
        notes_made.append(
            f"DDP's bucket of the first step ({size(held)}) is assumed to stay into the second, next to "
            "those that replace it: NCCL's watchdog decides, so a real rank may free it sooner or later"
        )
    return notes_made
