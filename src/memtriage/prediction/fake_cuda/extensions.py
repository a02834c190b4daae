"""Stand-ins for compiled parts of packages.

A package whose Python is installed alone finds a module whose functions cannot be called. Its operators are
Python with shape functions (`torch.library.custom_op`, `register_fake`): a trace asks these, and never gets
to the compiled part. DeepSpeed's optimizers find functions that do nothing.
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


IN_PLACE: Final = ("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lion")
"""Optimizers that DeepSpeed compiles when they are first used, by its own names. What they write is allocated
by their Python, and they allocate nothing (csrc/adam, csrc/adagrad and csrc/lion of DeepSpeed 0.19)."""
_BUILDERS: Final = "deepspeed.ops.op_builder.builder"
"""Where DeepSpeed keeps what it has compiled, by name."""


class _Absent(ModuleType):
    """Stands for a compiled module."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} is compiled for a GPU, and not installed")

        return function


class _InPlace(ModuleType):
    """Stands for a compiled module whose functions only write to tensors that they are given."""

    def __init__(self, name: str, compiled: ModuleType | None) -> None:
        super().__init__(name)
        self.__compiled__ = compiled

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


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


class _BuildersFinder(importlib.abc.MetaPathFinder):
    """Puts the stand-ins among what DeepSpeed has compiled, once it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == _BUILDERS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                _stand_in(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _stand_in(builders: ModuleType) -> None:
    loaded = builders.OpBuilder._loaded_ops
    for name in IN_PLACE:
        loaded[name] = _InPlace(name, loaded.get(name))


def _stand_no_longer(builders: ModuleType) -> None:
    loaded = builders.OpBuilder._loaded_ops
    for name in IN_PLACE:
        compiled = loaded.pop(name).__compiled__
        if compiled is not None:
            loaded[name] = compiled


@contextmanager
def compiled_parts_optional() -> Iterator[None]:
    """In the block packages can be imported without their compiled part."""
    finder, first = _Finder(), _BuildersFinder()
    sys.meta_path.insert(0, first)
    sys.meta_path.append(finder)
    if _BUILDERS in sys.modules:
        _stand_in(sys.modules[_BUILDERS])
    try:
        yield
    finally:
        sys.meta_path.remove(first)
        sys.meta_path.remove(finder)
        if _BUILDERS in sys.modules:
            _stand_no_longer(sys.modules[_BUILDERS])
        for name in COMPILED:
            if isinstance(sys.modules.get(name), _Absent):
                del sys.modules[name]
