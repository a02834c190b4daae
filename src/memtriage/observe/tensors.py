"""Facts about a tensor's storage, read without running the program's code or keeping anything alive."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """Identity of a storage: device name, base address, size in bytes. Holds nothing."""

    device: str
    address: int
    nbytes: int


class _Plain:
    """A tensor's attributes as `torch.Tensor` has them, whatever its subclass makes of these names."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        tensor = self._tensor
        return getattr(_loaded("torch").Tensor, name).__get__(tensor, type(tensor))


def plain(tensor: Any) -> Any:
    """Return what to read a tensor's attributes from: no property or method of a subclass runs.

    Call it, and what it gives, inside `undisturbed()`.
    """
    kind = type(tensor)
    is_plain = kind is _Plain or any(kind is plain_type for plain_type in _plain_types())
    return tensor if is_plain else _Plain(tensor)


@functools.cache
def _plain_types() -> tuple[type, ...]:
    return _loaded("torch").Tensor, _loaded("torch.nn").Parameter


def _loaded(name: str) -> Any:
    return sys.modules[name]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the program's `__torch_function__` and `__torch_dispatch__` from running in the block."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "_C"):  # else its import has only begun
        yield
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


_device_names: dict[Any, str] = {}


def storage_facts(tensor: Any) -> StorageFacts | None:
    """The tensor's storage, or None where there is none to speak of.

    None for meta and fake tensors, wrapper subclasses (their inner tensors carry the bytes), sparse
    layouts (their index and value tensors are walked on their own), and functorch's batched wrappers.
    Call it inside `undisturbed()`.
    """
    try:
        storage = plain(tensor).untyped_storage()
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


def end_bytes(tensor: Any, facts: StorageFacts, count: int, *, last: bool = False) -> bytes | None:
    """Return the first or the last bytes of a tensor's storage; None where they cannot be read.

    Of device memory it makes a host copy, which waits for the current stream; during the capture of a CUDA
    graph it gives None.
    """
    count = min(count, facts.nbytes)
    start = facts.nbytes - count if last else 0
    if facts.device == "cpu":
        return ctypes.string_at(facts.address + start, count)
    import torch

    tensor = plain(tensor)
    try:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        raw.set_(tensor.untyped_storage(), start, (count,), (1,))
        return bytes(raw.cpu().tolist())
    except (RuntimeError, NotImplementedError):
        return None


def is_pinned(tensor: Any) -> bool:
    """Whether a CPU tensor is page-locked; False where torch cannot tell. Never initializes CUDA."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        return bool(plain(tensor).is_pinned())
    except (RuntimeError, NotImplementedError):
        return False


def is_shared(tensor: Any) -> bool:
    """Whether a CPU tensor is in shared memory (`share_memory_`, a DataLoader worker's batch)."""
    try:
        return bool(plain(tensor).untyped_storage().is_shared())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
