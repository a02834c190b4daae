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
    """A tensor's attributes as `torch.Tensor` defines them, whatever its subclass does with these names."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        tensor = self._tensor
        return getattr(_loaded("torch").Tensor, name).__get__(tensor, type(tensor))


def plain(tensor: Any) -> Any:
    """Return an object from which to read a tensor's attributes without running code of a subclass.

    Use it inside `undisturbed()`.
    """
    kind = type(tensor)
    of_torch, parameter = _plain_types()
    return tensor if kind is of_torch or kind is parameter or kind is _Plain else _Plain(tensor)


@functools.cache
def _plain_types() -> tuple[type, type]:
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
    """The tensor's storage, or None if it has none of its own.

    None for meta and fake tensors, wrapper subclasses (their inner tensors have the bytes), sparse layouts
    (their index and value tensors are walked separately), and functorch's batched wrappers. Call it inside
    `undisturbed()`.
    """
    try:
        storage = plain(tensor).untyped_storage()
        device = storage.device  # the real one: a fake tensor names the device that it pretends to be on
        if device.type == "meta":
            return None  # torch warns if the address is read
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
    """Return the first or the last bytes of a tensor's storage; None if they cannot be read.

    Device memory is copied to the host, which waits for the current stream; None during the capture of a CUDA
    graph.
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
    """Whether a CPU tensor is page-locked; False if torch cannot say. Never initializes CUDA."""
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
