"""Operators whose kernel is Python: it runs, so that what it allocates is traced.

That holds for `torch.library.custom_op`, `triton_op` and `Library.impl`. Their shape functions know the
results alone. Where such a kernel calls native code, which wants addresses, the shape function answers after
all.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from memtriage.prediction.fake_cuda.tensors import addresses_refused
from memtriage.prediction.operators import FUNCTIONAL_COLLECTIVES, Args, Kwargs

_KEYS: Final = ("CUDA", "CompositeExplicitAutograd")
"""Where kernels for a GPU are registered, the more special one first."""


class PythonKernels:
    """Runs kernels that are Python.

    Attributes:
        native: operators whose kernels call native code.
    """

    def __init__(self) -> None:
        self.native: set[Any] = set()

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """The results of an operator; NotImplemented where its kernel is not Python alone.

        Raises:
            Exception: what the kernel raised, where the operator has no shape function either.
        """
        key = None if func in self.native else _key(func)
        if key is None:
            return NotImplemented
        try:
            with addresses_refused():
                return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        except Exception:
            self.native.add(func)
            return NotImplemented


def _key(func: Any) -> Any:
    """The dispatch key of the kernel for a GPU that was registered from Python; None without one."""
    if func.namespace.startswith(FUNCTIONAL_COLLECTIVES):  # they wrap what is waited for, and compute nothing
        return None
    name = func.name().replace("::", "/", 1)
    registered = torch.library._impls
    key = next((key for key in _KEYS if f"{name}/{key}" in registered), None)
    return None if key is None else getattr(torch._C.DispatchKey, key)
