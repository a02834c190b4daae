"""What an object keeps alive beyond what the cyclic collector sees: edges through C++."""

from __future__ import annotations

import sys
from types import MemberDescriptorType
from typing import Any, Final

from memtriage.observe import autograd
from memtriage.observe.classes import attributes_of, bases_of, instance_dict, read_member
from memtriage.observe.kinds import ARRAY, FUTURE, LOCALS, NODE, PLACEHOLDER, SAVED, TENSOR
from memtriage.observe.objects import array_base
from memtriage.observe.tensors import plain
from memtriage.process.stdlib import gc


def edges(obj: Any, kind: int, reader: autograd.NodeReader) -> list[Any]:
    if kind == TENSOR:
        return tensor_referents(obj)
    if kind == NODE:
        return reader.referents(obj)
    if kind == ARRAY and (base := array_base(obj)) is not None:
        return [base]
    if kind == LOCALS:
        return list(obj.values)
    if kind == FUTURE:
        return future_referents(obj)
    if kind == SAVED:
        return reader.saved_tensor_referents(obj)
    if kind == PLACEHOLDER:
        return reader.placeholder_referents(obj)
    return gc.get_referents(obj)


def future_referents(future: Any) -> list[Any]:
    """What a finished `torch.futures.Future` holds: C++ has its value, which no collector sees."""
    referents = gc.get_referents(future)
    try:
        if future.done():
            referents.append(sys.modules["torch"]._C.Future.value(future))
    except Exception as error:  # a failed future raises its error, of any type
        _forget_raise(error)
    return referents


def _forget_raise(error: Exception) -> None:
    """Remove what reading a failed future added to the traceback of its error, which the program raises
    again.

    Each raise adds entries to the beginning of the error's traceback, and with them frames and what they
    hold.
    """
    own = error.__traceback__
    entry = None if own is None else own.tb_next
    if entry is not None and entry.tb_frame.f_code.co_name == "raise_error":  # inside `Future.set_exception`
        entry = entry.tb_next
    error.__traceback__ = entry


def tensor_referents(tensor: Any) -> list[Any]:
    """What a tensor keeps alive: its Python attributes and hooks, `.grad`, `.grad_fn`, its view base."""
    referents = gc.get_referents(tensor) or hidden_attributes(tensor)
    tensor = plain(tensor)
    try:
        node = tensor.grad_fn
        if node is not None:
            referents.append(node)
            if tensor.retains_grad and tensor.grad is not None:
                referents.append(tensor.grad)
        elif tensor.grad is not None:
            referents.append(tensor.grad)
        if tensor._is_view() and tensor._base is not None:
            referents.append(tensor._base)
        if is_sparse(tensor):
            referents += sparse_parts(tensor)
    except (RuntimeError, AttributeError, ReferenceError):
        # functorch wrappers, deleted inference tensors: there is only what gc sees
        return referents
    return referents


def hidden_attributes(tensor: Any) -> list[Any]:
    """What the Python object of a tensor holds: attributes and hooks.

    Needed if the collector shows nothing. In torch 2.8 it shows nothing for a tensor that C++ also holds,
    such as a parameter in a graph; in torch 2.11 it shows at least the class (both measured). Reading the
    attributes makes their dict, as torch's own part of a collection did before C++ held the tensor.
    """
    held: list[Any] = [instance_dict(tensor)]
    held += [
        read_member(member, tensor)
        for base in bases_of(type(tensor))
        for member in attributes_of(base).values()
        if type(member) is MemberDescriptorType
    ]
    held += [getattr(plain(tensor), name, None) for name in _HOOKS]
    return [each for each in held if each is not None]


_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


def sparse_parts(tensor: Any) -> list[Any]:
    """The index and value tensors of a sparse tensor: C++ holds them, and no collector sees them.

    They are new Python objects at each call, with the same storages.
    """
    tensor = plain(tensor)
    names = _COO_PARTS if tensor.is_sparse else _COMPRESSED_PARTS
    parts = []
    with sys.modules["torch"].no_grad():
        for name in names:
            try:
                parts.append(getattr(tensor, name)())
            except RuntimeError:  # either rows or columns are compressed
                continue
    return parts


_COO_PARTS = ("_indices", "_values")
_COMPRESSED_PARTS = ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")


def is_sparse(tensor: Any) -> bool:
    """Whether a tensor has one of the sparse layouts."""
    return str(plain(tensor).layout).startswith("torch.sparse")
