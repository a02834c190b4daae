"""CUDA's autocast, done in Python: its C++ kernels pass over tensors that only play CUDA tensors.

The casts and the cache of cast weights follow `cached_cast` in ATen/autocast_mode.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from memtriage.prediction.fake_cuda.autocast_lists import LOWER, SINGLE, SINGLE_BY_DTYPE, SINGLE_NORM, WIDEST
from memtriage.prediction.fake_cuda.overrides import Overrides
from memtriage.prediction.fake_cuda.stand_ins import around, replaced
from memtriage.prediction.fake_cuda.tensors import is_gpu
from memtriage.prediction.operators import Args, Kwargs, mapped, tensors_in

RMS_NORM_SINGLE_SINCE: Final = (2, 12)
"""Pull request 188955 put `rms_norm` on the list of single precision."""


class Autocast:
    """The casts, and the cache of cast weights that lives as long as the outermost autocast region."""

    def __init__(self, version: tuple[int, int]) -> None:
        self._version = version
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def register(self, overrides: Overrides) -> None:
        """Replaces CUDA's autocast kernels by the casts."""
        single = [*SINGLE, *(["rms_norm"] if self._version >= RMS_NORM_SINGLE_SINCE else [])]
        for names, kernel in (
            (LOWER, self._lower),
            (single, self._single),
            (SINGLE_BY_DTYPE, self._single_by_dtype),
            (SINGLE_NORM, self._single_norm),
            (WIDEST, self._widest),
        ):
            for name in names:
                overrides.put(name, "AutocastCUDA", partial(around, function=kernel))

    @contextmanager
    def cache_kept(self) -> Iterator[None]:
        """While the block runs, leaving the outermost region also empties this cache."""
        original = torch.clear_autocast_cache

        def clear() -> None:
            self._cache.clear()
            original()

        try:
            with replaced(torch, "clear_autocast_cache", clear):
                yield
        finally:
            self._cache.clear()

    def _lower(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return _without_autocast(func, *self._cast(args, kwargs, torch.get_autocast_dtype("cuda")))

    def _single(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        return _without_autocast(func, *self._cast(args, kwargs, torch.float32))

    def _single_by_dtype(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """`fp32_set_opt_dtype`: no cast, but the accumulation and the result are single precision."""
        arguments = func._schema.arguments
        position = [argument.name for argument in arguments].index("dtype")
        given = args[position] if position < len(args) else kwargs.get("dtype")
        if given is None and is_gpu(args[0]) and args[0].is_floating_point():
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
            if not arguments[position].kwarg_only:
                defaults = (argument.default_value for argument in arguments[len(args) : position])
                args = (*args, *defaults, kwargs.pop("dtype"))
        return _without_autocast(func, args, kwargs)

    def _single_norm(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if not first.is_floating_point():
            return _without_autocast(func, args, kwargs)
        with _autocast_off():
            return torch.linalg.vector_norm(
                first,
                2.0 if len(args) < 2 or args[1] is None else args[1],
                *(args[2:4] if len(args) > 2 else ()),
                dtype=torch.float32,
            )

    def _widest(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        widest = torch.get_autocast_dtype("cuda")
        for tensor in tensors_in(args, kwargs):
            if _eligible(tensor) and tensor.dtype is torch.float32:
                widest = torch.float32
        return _without_autocast(func, *self._cast(args, kwargs, widest))

    def _cast(self, args: Args, kwargs: Kwargs, dtype: torch.dtype) -> Any:
        """The arguments in the other type, cast from the last to the first, as GCC evaluates a call's."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return self._cached(tensor, dtype)

        with _autocast_off():
            named = mapped(kwargs, cast)
            return tuple(mapped(arg, cast) for arg in reversed(args))[::-1], named

    def _cached(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _eligible(tensor) or tensor.dtype is dtype:
            return tensor
        kept = (
            dtype is torch.get_autocast_dtype("cuda")
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not kept:
            return tensor.to(dtype)
        cached = self._cache.get(id(tensor))
        if cached is None:
            cached = self._cache[id(tensor)] = (tensor, tensor.to(dtype))
        return cached[1]


def _eligible(tensor: torch.Tensor) -> bool:
    return is_gpu(tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64


def _autocast_off() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA))


def _without_autocast(func: Any, args: Any, kwargs: Any) -> Any:
    with _autocast_off():
        return func(*args, **kwargs)
