"""Compiled parts of packages whose Python is installed alone: a module whose functions cannot be called.

Their operators are Python with shape functions (`torch.library.custom_op`, `register_fake`): a trace asks
these, and never gets to the compiled part.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

COMPILED: Final = frozenset({"flash_attn_2_cuda", "flash_attn_3._C"})
"""Modules that are compiled for CUDA, of packages whose operators have shape functions in Python."""


class _Absent(ModuleType):
    """Stands for a compiled module."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} is compiled for a GPU, and not installed")

        return function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for what no other finder finds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in COMPILED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


@contextmanager
def compiled_parts_optional() -> Iterator[None]:
    """In the block packages can be imported without their compiled part."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in COMPILED:
            if isinstance(sys.modules.get(name), _Absent):
                del sys.modules[name]
