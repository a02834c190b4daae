"""Shapes of results, kept from call to call: PyTorch's shape functions take most of a trace's time."""

from __future__ import annotations

from typing import Any

import torch

from memtriage.prediction.fake_cuda.tensors import META
from memtriage.prediction.operators import Args, Kwargs, Operator, mapped, tensors_in


class KnownShapes:
    """Results of operators, by the shapes of their arguments and all else that they were given.

    Only results with a storage of their own are kept, and only as shapes: a view shares its argument's.
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def key(self, func: Any, operator: Operator, args: Args, kwargs: Kwargs) -> Any:
        """What the shapes of the results depend on; None where that cannot be said."""
        if not operator.makes or operator.written or operator.written_names:
            return None
        try:
            parts = _described(args), *((name, _described(each)) for name, each in kwargs.items())
            key = (func, torch.get_default_dtype(), parts)
            hash(key)
        except (TypeError, RuntimeError):
            return None
        return key

    def find(self, key: Any) -> Any:
        """The results for a key, with new storages; None when it is new."""
        kept = self._made.get(key) if key is not None else None
        return None if kept is None else mapped(kept, _like)

    def keep(self, key: Any, made: Any, args: Any, kwargs: Any) -> None:
        """Keep the shapes of results."""
        if key is None:
            return
        taken = {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs)}
        results = tensors_in(made)
        for result in results:
            storage = result.untyped_storage()
            if (
                storage._cdata in taken
                or type(result) is not torch.Tensor
                or result.device != META
                or result.layout is not torch.strided
                or result.is_conj()
                or result.is_neg()
            ):
                return
            taken.add(storage._cdata)
            if result.storage_offset() or storage.nbytes() != _like(result).untyped_storage().nbytes():
                return
        if results:
            self._made[key] = mapped(made, _like)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def _described(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        if argument.layout is not torch.strided or argument.is_conj() or argument.is_neg():
            raise TypeError("no plain tensor")
        return (
            argument.shape,
            argument.stride(),
            argument.dtype,
            argument.is_meta,
            argument.storage_offset(),
            argument._is_view(),
        )
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple(map(_described, argument))
    return type(argument), argument  # 1, 1.0 and True are equal
