"""Tensors without data that Python and the dispatcher take for CUDA tensors.

Their storage is on the `meta` device, so that they need no memory and the autograd engine needs no CUDA
runtime; their dispatch keys are CUDA's, so that autocast and autograd take the paths of CUDA. Large tensors
of the host are faked the same way with the CPU's keys. `torch.Tensor.device` is replaced for the time of a
trace and says `cuda:0` or `cpu` for them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch._meta_registrations  # registers the meta kernels that are written in Python

from memtriage.prediction.fake_cuda.stand_ins import all_replaced, around

META: Final = torch.device("meta")
CUDA: Final = torch.device("cuda", 0)
CPU: Final = torch.device("cpu")

_KEY: Final = torch._C.DispatchKey
_keys_of: Final = torch._C._dispatch_keys
_true_device: Final = torch.Tensor.device
_true_is_cuda: Final = torch.Tensor.is_cuda
_true_is_cpu: Final = torch.Tensor.is_cpu

_played = CUDA


class _Thread(threading.local):
    """Where this thread is. Others (a DataLoader's that pins memory) make tensors at the same time."""

    in_kernel = False
    meta_meant = False
    addresses_refused = False


_thread = _Thread()


def true_device(tensor: torch.Tensor) -> torch.device:
    """Where the storage really is."""
    device: torch.device = _true(_true_device, tensor)
    return device


def _true(attribute: Any, tensor: torch.Tensor) -> Any:
    """What a replaced attribute says. `__torch_function__` of a subclass would ask the replacement."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return attribute.__get__(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return attribute.__get__(tensor)


def gpu() -> torch.device:
    """The GPU that the program sees: `cuda:N`, N being the rank of its process."""
    return _played


def is_gpu(tensor: torch.Tensor) -> bool:
    """Whether this tensor plays a CUDA tensor."""
    return bool(_keys_of(tensor).has(_KEY.CUDA)) and not _true(_true_is_cuda, tensor)


def is_host_fake(tensor: torch.Tensor) -> bool:
    """Whether this tensor plays a tensor of the host, without data."""
    return bool(_keys_of(tensor).has(_KEY.CPU)) and not _true(_true_is_cpu, tensor)


def as_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same storage as a tensor that plays one of `device`; itself when it does already."""
    if true_device(tensor).type != "meta":
        return tensor
    if _keys_of(tensor).has(_KEY.CUDA if device.type == "cuda" else _KEY.CPU):
        return tensor
    made: torch.Tensor = torch.Tensor._make_subclass(
        torch.Tensor, tensor, tensor.requires_grad, device_for_backend_keys=device
    )
    return made


def fake_device(tensor: torch.Tensor) -> torch.device:
    """The device that the program sees."""
    device = true_device(tensor)
    if device.type != "meta" or _thread.in_kernel:
        return device
    keys = _keys_of(tensor)
    if keys.has(_KEY.CUDA):
        return _played
    if keys.has(_KEY.CPU):
        return CPU
    inner = parts(tensor)
    return device if inner[0] is tensor else fake_device(inner[0])


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper (DTensor) holds; the tensor itself when it is none."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    held = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for inner in held if isinstance(inner, torch.Tensor) for part in parts(inner)]


@contextmanager
def devices_true() -> Iterator[None]:
    """In the block tensors say where they are: it works with other tensors without data (`FakeTensor`)."""
    before = _thread.in_kernel
    _thread.in_kernel = True
    try:
        yield
    finally:
        _thread.in_kernel = before


def in_kernel() -> bool:
    """Whether this thread runs a kernel that stands for another, see `kernel`."""
    return _thread.in_kernel


@contextmanager
def kernel() -> Iterator[None]:
    """The block runs meta kernels, in which tensors are what they are: on the meta device."""
    with torch._C._PreserveDispatchKeyGuard(), devices_true():
        torch._C._set_meta_in_tls_dispatch_include(True)
        yield


class AddressRefusedError(RuntimeError):
    """A tensor without data has no address."""


@contextmanager
def addresses_refused() -> Iterator[None]:
    """In the block `Tensor.data_ptr` raises `AddressRefusedError`: native code is not to get an address."""
    before = _thread.addresses_refused
    _thread.addresses_refused = True
    try:
        yield
    finally:
        _thread.addresses_refused = before


def _addressed(original: Callable[[torch.Tensor], int], self: torch.Tensor) -> int:
    if _thread.addresses_refused and true_device(self).type == "meta":
        raise AddressRefusedError("a tensor without data has no address")
    return original(self)


def meta_is_meant() -> bool:
    """Whether the program itself asked for the meta device, and not C++ for the options of some tensor."""
    return _thread.meta_meant


def meaning_meta(function: Callable[..., Any], asks: Callable[..., bool]) -> Callable[..., Any]:
    """The function, inside which `meta` is what the program means where `asks` says so of its arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _thread.meta_meant
        _thread.meta_meant = before or asks(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            _thread.meta_meant = before

    return call


@contextmanager
def fake_devices(index: int) -> Iterator[None]:
    """Replaces the device attributes and conversions of `torch.Tensor` for the time of the block.

    Args:
        index: of the GPU, as the program sees it.
    """
    global _played
    replacements: dict[str, Any] = {
        "device": property(fake_device),
        "is_cuda": property(lambda self: fake_device(self).type == "cuda"),
        "is_cpu": property(lambda self: fake_device(self).type == "cpu"),
        "is_meta": property(lambda self: fake_device(self).type == "meta"),
        "get_device": lambda self: index if fake_device(self).type == "cuda" else -1,
        "to": _wrapped_to(torch.Tensor.to),
        "cuda": _moved_to("cuda"),
        "cpu": _moved_to("cpu"),
        "data_ptr": around(torch.Tensor.data_ptr, _addressed),
        "tolist": around(torch.Tensor.tolist, _valued),
        "new_tensor": around(torch.Tensor.new_tensor, _like_self),
        "__repr__": around(torch.Tensor.__repr__, _described),
        "pin_memory": lambda self, device=None: self,
        "is_pinned": lambda self, device=None: False,
    }
    uninitialized = torch.nn.parameter.UninitializedTensorMixin
    allowed = uninitialized._allowed_methods
    with all_replaced((torch.Tensor, name, value) for name, value in replacements.items()):
        uninitialized._allowed_methods = [*allowed, *(getattr(torch.Tensor, name) for name in replacements)]
        _played = torch.device("cuda", index)
        try:
            yield
        finally:
            _played = CUDA
            uninitialized._allowed_methods = allowed


def _wrapped_to(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.to` that compares with the played device: its C++ side sees `meta` and would always copy."""
    # To the true meta device, where it would never copy.
    to_meta = meaning_meta(torch.ops.aten._to_copy.default, lambda *args, **kwargs: True)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if (args and isinstance(args[0], torch.Tensor)) or "other" in kwargs:
            other = kwargs.pop("other", None)
            if other is None:
                other, args = args[0], args[1:]
            args = (fake_device(other), other.dtype, *args)
        if args and isinstance(args[0], (str, int, torch.device)):
            kwargs.update(zip(("device", "dtype", "non_blocking", "copy"), args, strict=False))
            args = ()
            if kwargs.get("dtype") is None:
                kwargs.pop("dtype", None)
        wanted = kwargs.get("device")
        if wanted is not None and not args:
            device = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)
            if device.type == fake_device(self).type and true_device(self).type == "meta":
                del kwargs["device"]
                if not any(value is not None and value is not False for value in kwargs.values()):
                    return self
                if "dtype" not in kwargs:
                    kwargs["dtype"] = self.dtype
            elif device.type == "cuda":
                kwargs["device"] = CUDA
            if device.type == "meta":
                kwargs["device"] = META
                if fake_device(self).type != "meta" and true_device(self).type == "meta":
                    return to_meta(self, dtype=kwargs.get("dtype"), device=META)
        return original(self, *args, **kwargs)

    return to


def _valued(original: Callable[..., Any], self: torch.Tensor) -> Any:
    """`Tensor.tolist`, which copies from the device first; of a host tensor without data as `numpy`."""
    if is_host_fake(self):
        return self.numpy().tolist()
    return original(self.cpu() if fake_device(self).type == "cuda" else self)


def _like_self(
    original: Callable[..., torch.Tensor], self: torch.Tensor, data: Any, **kwargs: Any
) -> torch.Tensor:
    """`Tensor.new_tensor`, on the device that the tensor plays."""
    if fake_device(self).type != "cuda":
        return original(self, data, **kwargs)
    return torch.tensor(data, **{"dtype": self.dtype, "device": fake_device(self), **kwargs})


def _described(original: Callable[..., str], self: torch.Tensor, *args: Any, **kwargs: Any) -> str:
    """`repr` of a tensor without values, and of any inside a kernel: torch's would compute there."""
    if true_device(self).type != "meta" and not _thread.in_kernel:
        return original(self, *args, **kwargs)
    return f"tensor(..., device={str(fake_device(self))!r}, size={tuple(self.shape)}, dtype={self.dtype})"


def _moved_to(kind: str) -> Callable[..., torch.Tensor]:
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if fake_device(self).type == kind:
            return self
        return self.to(CUDA if kind == "cuda" else CPU)

    return move
