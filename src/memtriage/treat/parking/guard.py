"""Make the use of a parked tensor raise an error that says so.

torch itself does not check: an element-wise kernel on a storage of size 0 reads address 0, which ends a CPU
process with a segmentation fault and a CUDA context with an illegal access (matrix products and views do
raise). So until a parked tensor is back, its Python object gets a subclass of its class that intercepts every
torch function, except those that read nothing. Models also get a forward pre-hook, for accesses to a
parameter through another object (FSDP2 keeps its own views), and parameters with a parked gradient get a
hook, because backward adds to it without calling Python.

Known limitations: other objects than the given ones and those found through them (a view kept elsewhere, a
tensor saved for backward, a compiled graph's own reference) are not guarded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from memtriage.treat.parking.choose import tensors_in
from memtriage.treat.parking.handle import ParkedError
from memtriage.treat.parking.registry import title_of

_Hookable = TypeVar("_Hookable", nn.Module, Tensor)

_READ_NOTHING: Final = frozenset(
    (
        "size", "stride", "dim", "numel", "nelement", "element_size", "storage_offset", "is_contiguous",
        "is_floating_point", "is_complex", "is_inference", "untyped_storage", "register_hook", "retain_grad",
        "register_post_accumulate_grad_hook", "requires_grad_", "__len__", "__hash__", "dim_order",
        "is_pinned", "is_shared", "get_device", "ndimension", "is_conj", "is_neg", "is_set_to",
        "is_same_size", "is_signed",
    )
)  # fmt: skip
"""Methods that only read a tensor's metadata."""
_READ_NOTHING_ATTRIBUTES: Final = frozenset(
    (
        "shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "ndim", "names",
        "itemsize", "nbytes", "output_nr", "_version", "is_cuda", "is_cpu", "is_xpu", "is_xla", "is_ipu",
        "is_hpu", "is_mtia", "is_maia", "is_mps", "is_vulkan", "is_meta", "is_sparse", "is_sparse_csr",
        "is_mkldnn", "is_quantized", "is_nested", "retains_grad", "_backward_hooks",
        "_post_accumulate_grad_hooks", "_grad", "_cdata",
    )
)  # fmt: skip
"""Attributes likewise, without `data` and `T`, which return an object that is not guarded."""
_SETTABLE: Final = frozenset(("grad", "requires_grad", "_grad", "_backward_hooks"))
_SHOWN: Final = frozenset(("__repr__", "__str__", "__format__"))


class Guard:
    """Guards tensors and modules while they are parked."""

    def __init__(self) -> None:
        self._hooks: list[_Hook] = []

    def cover(self, tensor: Tensor) -> bool:
        """Make uses of this object fail; False if its class does not allow that."""
        kind = type(tensor)
        if issubclass(kind, _GuardedMixin):
            return True
        if kind not in _guarded:
            _guarded[kind] = _make_guarded(kind)
        guarded = _guarded[kind]
        if guarded is None:
            return False
        try:
            tensor.__class__ = guarded
        except TypeError:  # another layout in memory
            return False
        return True

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Make the forward of modules fail while one of their own parameters or buffers is parked."""
        for module in self._unhooked(modules):
            if _parked_in(module) is not None:
                handle = module.register_forward_pre_hook(_before_forward, prepend=True)
                self._hooks.append(_Hook(weakref.ref(module), _parked_in, handle))

    def watch_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Make backward fail if it would add to a parked gradient."""
        for parameter in self._unhooked(parameters):
            if _parked_gradient(parameter) is not None:
                handle = parameter.register_hook(_before_adding(weakref.ref(parameter)))
                self._hooks.append(_Hook(weakref.ref(parameter), _parked_gradient, handle))

    def sweep(self) -> None:
        """Remove hooks from objects of which nothing is parked any more."""
        kept = []
        for hook in self._hooks:
            if hook.needed():
                kept.append(hook)
            else:
                hook.handle.remove()
        self._hooks = kept

    def _unhooked(self, objects: Iterable[_Hookable]) -> list[_Hookable]:
        hooked = {id(hook.on()) for hook in self._hooks}
        return list(
            {id(candidate): candidate for candidate in objects if id(candidate) not in hooked}.values()
        )


@dataclass(frozen=True, slots=True)
class _Hook:
    """A hook that exists while something is parked.

    Attributes:
        on: the object with the hook.
        parked: returns what of that object is parked.
        handle: removes it.
    """

    on: weakref.ref[Any]
    parked: Callable[[Any], str | None]
    handle: Any

    def needed(self) -> bool:
        """Whether anything is still parked."""
        there = self.on()
        return there is not None and self.parked(there) is not None


def _parked_in(module: nn.Module) -> str | None:
    # Not `module.buffers()`: Megatron's DistributedDataParallel has a list of that name.
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        title = None if tensor is None else title_of(tensor)
        if title is not None:
            return title
    return None


def _parked_gradient(parameter: Tensor) -> str | None:
    gradient = parameter.grad
    return None if gradient is None else title_of(gradient)


def _before_forward(module: nn.Module, _args: Any) -> None:
    title = _parked_in(module)
    if title is not None:
        raise _error(f"the forward of {type(module).__name__}", title)


def _before_adding(reference: weakref.ref[Tensor]) -> Callable[[Tensor], None]:
    def before_adding(_gradient: Tensor) -> None:
        parameter = reference()
        title = None if parameter is None else _parked_gradient(parameter)
        if title is not None:
            raise _error("backward", title)

    return before_adding


class _GuardedMixin:
    """Mixed into every guarded class."""

    __slots__ = ()
    _parked_kind: type

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        guarded = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, _GuardedMixin)]
        parked = None
        for tensor in guarded:
            title = title_of(tensor)
            if title is None:  # it was brought back while nothing referred to this object
                uncover(tensor)
            elif parked is None:
                parked = title
        if parked is None:
            return function(*args, **kwargs)
        if _reads_nothing(function):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if getattr(function, "__name__", "") in _SHOWN:
            return f"<parked on the host: {parked}>"
        raise _error(_name_of(function), parked)


_guarded: Final[dict[type, type | None]] = {}


def _make_guarded(kind: type) -> type | None:
    body = {"__slots__": (), "__module__": kind.__module__, "_parked_kind": kind}
    try:
        made: type = type(kind)(f"Parked{kind.__name__}", (_GuardedMixin, kind), body)
    except TypeError:  # a final class, or a metaclass of its own kind
        return None
    return made


def uncover(tensor: Any) -> None:
    """Restore an object, if it is guarded."""
    kind = type(tensor)
    if issubclass(kind, _GuardedMixin):
        tensor.__class__ = kind._parked_kind


def _reads_nothing(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    if name == "__get__":
        return attribute in _READ_NOTHING_ATTRIBUTES
    if name in ("__set__", "__delete__"):
        return attribute in _SETTABLE
    return name in _READ_NOTHING


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    return f"Tensor.{attribute}" if name.startswith("__") and attribute else name


def _error(use: str, title: str) -> ParkedError:
    return ParkedError(
        f"{use} was called with {title}, which is parked: its values are on the host and its device "
        "memory was released. Call memtriage.unpark() first"
    )
