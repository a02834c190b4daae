"""Lets `FakeTensor`, in which Dynamo and AOTAutograd trace, work beside the tensors of a trace.

Both have their storage on the meta device and CUDA's dispatch keys. In C++ a `FakeTensor` answers `cuda` all
the same, and autograd would ask the CUDA runtime for its stream. Here it answers `meta` in C++, as the
tensors of a trace do, and `cuda` in Python.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtriage.prediction.fake_cuda.tensors import CPU, CUDA, META, devices_true, meta_is_meant
from memtriage.prediction.scratch.convolution import memory_format

_DEVICE: Final = 6
"""Position of the device in `_make_wrapper_subclass`, counted without the class."""
_DISPATCH_DEVICE: Final = 10
"""Position of the flag by which C++ asks Python for the device."""


def replacements() -> list[tuple[Any, str, Any]]:
    """The attributes to replace: owner, name, value."""
    from torch._dynamo import trace_rules
    from torch._subclasses import fake_impls, fake_tensor, functional_tensor
    from torch.fx.experimental import proxy_tensor

    fake = fake_tensor.FakeTensor
    converter = fake_tensor.FakeTensorConverter
    asked = torch.ops.prim.device.default
    return [
        (fake, "__new__", staticmethod(_with_true_devices(fake.__new__))),
        (
            fake,
            "__torch_dispatch__",
            classmethod(_answers_meta(fake.__dict__["__torch_dispatch__"].__func__)),
        ),
        (
            fake_tensor,
            "_DISPATCH_META_HANDLERS",
            {**fake_tensor._DISPATCH_META_HANDLERS, asked: lambda args: _told(args[0])},
        ),
        # Of `torch.Tensor` they ask C++, which asks Python again: slow, and Inductor asks often.
        *((fake, f"is_{kind}", _on(kind)) for kind in ("cuda", "cpu", "meta")),
        (converter, "from_meta_and_device", _with_true_devices(converter.from_meta_and_device)),
        *(
            (module, "in_kernel_invocation_manager", _true_inside(fake_tensor.in_kernel_invocation_manager))
            for module in (fake_tensor, fake_impls)
        ),
        (trace_rules, "get_tensor_method", _with_replaced_methods(trace_rules.get_tensor_method)),
        (proxy_tensor, "unset_fake_temporarily", _on_host_inside(proxy_tensor.unset_fake_temporarily)),
        (torch._C, "_conv_determine_backend_memory_format", _convolution_layout),
        (functional_tensor.FunctionalTensor, "tolist", _listed),
        (fake_tensor, "init_gpu_context", lambda *args: None),
        (fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True)),
        (
            torch.Tensor,
            "_make_wrapper_subclass",
            staticmethod(_asking(functional_tensor.FunctionalTensor, torch.Tensor._make_wrapper_subclass)),
        ),
        *(
            (mode, "__torch_dispatch__", _placed(mode.__torch_dispatch__))
            for mode in (
                functional_tensor.FunctionalTensorMode,
                proxy_tensor.ProxyTorchDispatchMode,
                fake_tensor.FakeTensorMode,
            )
        ),
    ]


def _with_replaced_methods(original: Any) -> Callable[[], frozenset[Any]]:
    """The tensor methods that Dynamo knows, with those that a trace has replaced and calls in turn."""

    @functools.cache
    def tensor_methods() -> frozenset[Any]:
        called = (getattr(method, "__wrapped__", None) for method in vars(torch.Tensor).values())
        replaced = {method for method in called if isinstance(method, types.MethodDescriptorType)}
        known: frozenset[Any] = original.__wrapped__()  # not from its cache, nor into it
        return known | replaced

    return tensor_methods


def _convolution_layout(source: torch.Tensor, weight: torch.Tensor, backend: object) -> torch.memory_format:
    """The layout of a convolution's results; C++ knows that of kernels for the host, as it is told no GPU."""
    return memory_format(source, weight)


def _listed(tensor: torch.Tensor) -> Any:
    """`FunctionalTensor.tolist`, which takes what C++ wraps apart: its parts would be on another device."""
    return [_listed(part) for part in tensor.unbind()] if tensor.dim() else tensor.item()


def _on(kind: str) -> property:
    return property(lambda self: self.device.type == kind)


def _told(tensor: torch.Tensor) -> torch.device:
    """The device that C++ is told."""
    mode = getattr(tensor, "fake_mode", None)
    if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.CUDA) or (mode and mode.in_kernel_invocation):
        return META
    device: torch.device = getattr(tensor, "fake_device", CPU)
    return device


def _answers_meta(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _told(args[0])
        return original(cls, func, types, args, kwargs or {})

    return dispatch


def _asking(kind: type, original: Callable[..., Any]) -> Callable[..., Any]:
    """`_make_wrapper_subclass`, whose wrappers of this kind let C++ ask Python for their device."""

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is kind and len(args) > _DISPATCH_DEVICE and getattr(args[_DEVICE], "type", None) == "cuda":
            args = (*args[:_DISPATCH_DEVICE], True, *args[_DISPATCH_DEVICE + 1 :])
        return original(cls, *args, **kwargs)

    return make


def _placed(original: Callable[..., Any]) -> Callable[..., Any]:
    """A mode, for which `meta` that the program did not ask for is what C++ was told."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if device is not None and device.type == "meta" and not meta_is_meant():
            kwargs = {**kwargs, "device": CUDA}
        return original(self, func, types, args, kwargs or {})

    return dispatch


def _with_true_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with devices_true():
            return original(*args, **kwargs)

    return call


def _true_inside(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def entered(mode: Any) -> Iterator[None]:
        with original(mode), devices_true():
            yield

    return entered


def _on_host_inside(original: Callable[..., Any]) -> Callable[..., Any]:
    """The block in which constants of a graph are computed for real, of which the GPU would have some."""

    @contextmanager
    def entered() -> Iterator[None]:
        with original(), MadeOnHost():
            yield

    return entered


class MadeOnHost(TorchDispatchMode):  # type: ignore[misc]
    """Makes on the host what is to be made on the device, for values that a compiler computes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if named.get("device") is not None:
            named["device"] = CPU
        return func(*(CPU if isinstance(arg, torch.device) else arg for arg in args), **named)
