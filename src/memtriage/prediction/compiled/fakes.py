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

from memtriage.prediction.fake_cuda.stand_ins import around
from memtriage.prediction.fake_cuda.tensors import CPU, CUDA, META, devices_true, meta_is_meant
from memtriage.prediction.operators import Args, Kwargs
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
    entered, unset = fake_tensor.in_kernel_invocation_manager, proxy_tensor.unset_fake_temporarily
    return [
        (fake, "__new__", staticmethod(devices_true()(fake.__new__))),
        (
            fake,
            "__torch_dispatch__",
            classmethod(around(fake.__dict__["__torch_dispatch__"].__func__, _answers_meta)),
        ),
        (
            fake_tensor,
            "_DISPATCH_META_HANDLERS",
            {**fake_tensor._DISPATCH_META_HANDLERS, asked: lambda args: _told(args[0])},
        ),
        # Of `torch.Tensor` they ask C++, which asks Python again: slow, and Inductor asks often.
        *((fake, f"is_{kind}", _on(kind)) for kind in ("cuda", "cpu", "meta")),
        (converter, "from_meta_and_device", devices_true()(converter.from_meta_and_device)),
        *(
            (module, "in_kernel_invocation_manager", around(entered, _true_inside))
            for module in (fake_tensor, fake_impls)
        ),
        (trace_rules, "get_tensor_method", _with_replaced_methods(trace_rules.get_tensor_method)),
        (proxy_tensor, "unset_fake_temporarily", around(unset, _on_host_inside)),
        (torch._C, "_conv_determine_backend_memory_format", _convolution_layout),
        (functional_tensor.FunctionalTensor, "tolist", _listed),
        (fake_tensor, "init_gpu_context", lambda *args: None),
        (fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda self: True)),
        (
            torch.Tensor,
            "_make_wrapper_subclass",
            staticmethod(
                around(torch.Tensor._make_wrapper_subclass, _asking, functional_tensor.FunctionalTensor)
            ),
        ),
        *(
            (mode, "__torch_dispatch__", around(mode.__torch_dispatch__, _placed))
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


def _answers_meta(
    original: Callable[..., Any], cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    if func is torch.ops.prim.device.default:
        return _told(args[0])
    return original(cls, func, types, args, kwargs or {})


def _asking(kind: type, original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`_make_wrapper_subclass`, whose wrappers of this kind let C++ ask Python for their device."""
    if cls is kind and len(args) > _DISPATCH_DEVICE and getattr(args[_DEVICE], "type", None) == "cuda":
        args = (*args[:_DISPATCH_DEVICE], True, *args[_DISPATCH_DEVICE + 1 :])
    return original(cls, *args, **kwargs)


def _placed(
    original: Callable[..., Any], self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """A mode, for which `meta` that the program did not ask for is what C++ was told."""
    device = (kwargs or {}).get("device")
    if device is not None and device.type == "meta" and not meta_is_meant():
        kwargs = {**kwargs, "device": CUDA}
    return original(self, func, types, args, kwargs or {})


@contextmanager
def _true_inside(original: Callable[..., Any], mode: Any) -> Iterator[None]:
    with original(mode), devices_true():
        yield


@contextmanager
def _on_host_inside(original: Callable[..., Any]) -> Iterator[None]:
    """The block in which constants of a graph are computed for real, of which the GPU would have some."""
    with original(), MadeOnHost():
        yield


class MadeOnHost(TorchDispatchMode):  # type: ignore[misc]
    """Makes on the host what is to be made on the device, for values that a compiler computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        named = dict(kwargs or {})
        if named.get("device") is not None:
            named["device"] = CPU
        return func(*(CPU if isinstance(arg, torch.device) else arg for arg in args), **named)
