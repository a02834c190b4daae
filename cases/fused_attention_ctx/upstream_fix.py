"""The fix that TransformerEngine has from 2.15 on, as a patch for the releases before it."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from types import ModuleType, TracebackType
from typing import Any, Self

import torch

RESTORE = re.compile(r"restore_from_saved\((\w+)\.tensor_objects, \1\.saved_tensors\)")
FIXED = "_restore_from_func_ctx"


class DropAfterRestore:
    """Rewrites each `backward` that leaves its list on the context, as TransformerEngine #2772 did.

    `restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)` becomes a call that does this and then sets
    `ctx.tensor_objects = None`. Leaving the context puts the original methods back.

    Args:
        package: whose loaded modules are rewritten.

    Raises:
        RuntimeError: on entering, when no function of the package has the pattern.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._originals: list[tuple[type, Any]] = []
        self._modules: list[ModuleType] = []

    def __enter__(self) -> Self:
        for module in _modules(self._package):
            for function in list(vars(module).values()):
                if _is_function_of(function, module):
                    self._rewrite(function, module)
        if not self._originals:
            raise RuntimeError(f"no autograd function of {self._package} leaves a list on its context")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for function, original in self._originals:
            function.backward = original
        for module in self._modules:
            vars(module).pop(FIXED, None)
        self._originals, self._modules = [], []

    def _rewrite(self, function: type, module: ModuleType) -> None:
        source = textwrap.dedent(inspect.getsource(function.backward))
        fixed, count = RESTORE.subn(rf"{FIXED}(\1)", source)
        if not count:
            return
        vars(module)[FIXED] = _restoring(module)
        self._modules.append(module)
        made: dict[str, Any] = {}
        exec(compile(fixed, f"{module.__file__} (fixed)", "exec"), vars(module), made)
        self._originals.append((function, vars(function)["backward"]))
        function.backward = made["backward"]


def _restoring(module: ModuleType) -> Any:
    def restore_from_func_ctx(ctx: Any) -> Any:
        restored = vars(module)["restore_from_saved"](ctx.tensor_objects, ctx.saved_tensors)
        ctx.tensor_objects = None
        return restored

    return restore_from_func_ctx


def _modules(package: str) -> list[ModuleType]:
    below = f"{package}."
    return [module for name, module in list(sys.modules.items()) if name == package or name.startswith(below)]


def _is_function_of(value: Any, module: ModuleType) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, torch.autograd.Function)
        and value.__module__ == module.__name__
        and "backward" in vars(value)
    )
