"""What NCCL holds on the device, outside PyTorch's allocator."""

from __future__ import annotations

from typing import Final

COMMUNICATOR: Final = 576 << 20
"""Bytes of one communicator (sglang #30908; between the 544 and 688 MB of nccl #964). It depends on NCCL's
version, its channels and its transports; nccl #864 and #1685 report up to gigabytes."""


def notes(world_size: int, communicators: int) -> list[str]:
    """What is assumed of a job of many ranks."""
    if communicators:
        return [
            f"NCCL is taken to hold {COMMUNICATOR >> 20} MiB outside the allocator for each communicator, of "
            f"which there {'is' if communicators == 1 else 'are'} {communicators}: others report this much, "
            "and it varies with its version and the network"
        ]
    if world_size > 1:
        return [f"world_size={world_size}, but the ranks do not communicate: each is predicted alone"]
    return []
