"""What can be told of a tensor's storage without running or keeping anything."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """Identity of a storage: device name, base address, size in bytes. Holds nothing."""

    device: str
    address: int
    nbytes: int


_device_names: dict[Any, str] = {}


def storage_facts(tensor: Any) -> StorageFacts | None:
    """The tensor's storage, or None where there is none to speak of.

    None for meta and fake tensors, wrapper subclasses (their inner tensors carry the bytes), sparse
    layouts (their index and value tensors are walked on their own), and functorch's batched wrappers.
    Call it under `torch._C.DisableTorchFunction`, so that no subclass code runs.
    """
    try:
        storage = tensor.untyped_storage()
        device = storage.device  # where it really is: a fake tensor names the device that it plays
        if device.type == "meta":
            return None  # torch warns when one asks for the address
        address = storage.data_ptr()
        nbytes = storage.nbytes()
    except (RuntimeError, NotImplementedError, AttributeError, ReferenceError):
        return None
    if not address or not nbytes:
        return None
    name = _device_names.get(device)
    if name is None:
        name = _device_names[device] = "cpu" if device.type == "cpu" else str(device)
    return StorageFacts(name, address, nbytes)


def first_bytes(tensor: Any, facts: StorageFacts, count: int) -> bytes | None:
    """The first bytes of a tensor's storage; None where they cannot be read.

    Of device memory it makes a host copy, which waits for the current stream; during the capture of a CUDA
    graph it gives None.
    """
    count = min(count, facts.nbytes)
    if facts.device == "cpu":
        return ctypes.string_at(facts.address, count)
    import torch

    try:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        raw.set_(tensor.untyped_storage(), 0, (count,), (1,))
        return bytes(raw.cpu().tolist())
    except (RuntimeError, NotImplementedError):
        return None


def is_pinned(tensor: Any) -> bool:
    """Whether a CPU tensor is page-locked; False where torch cannot tell. Never initialises CUDA."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        return bool(tensor.is_pinned())
    except (RuntimeError, NotImplementedError):
        return False


def is_shared(tensor: Any) -> bool:
    """Whether a CPU tensor lies in shared memory (`share_memory_`, a DataLoader worker's batch)."""
    try:
        return bool(tensor.untyped_storage().is_shared())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
