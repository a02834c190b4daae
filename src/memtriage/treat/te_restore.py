"""TransformerEngine #1935: empty the list `ctx.tensor_objects` as soon as backward has read it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Self

from memtriage.catalogue.scene import Scene

_NAME: Final = "restore_from_saved"
_MARK: Final = "_memtriage_original"


class EmptyAfterRestore:
    """Wraps TransformerEngine's `restore_from_saved`, so that quantized tensors are freed after backward.

        with EmptyAfterRestore():
            train()

    or `apply()` and `undo()`. `restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)` writes the saved
    tensors back into the objects of the list. The list, and so the tensors, stay on the autograd node until
    the next iteration rebinds the loss; with checkpointing the tensors of all layers accumulate. The wrapper
    empties the list when its objects are returned. TransformerEngine does something similar from 2.15 on
    (#2772).

    Results of training are bit-identical, because backward reads the same values. A backward that keeps its
    graph (retain_graph=True, create_graph=True) keeps the list, because the next one reads it.

    Raises:
        RuntimeError: when applied, if the library is not loaded, has no such function, or is wrapped already;
            the text says which.

    Limits: an import of the function under another name is not seen. Modules that are imported later get the
    wrapped function, and `undo()` finds them, too.
    """

    def __init__(self, package: str = "transformer_engine") -> None:
        self._package = package
        self._wrapper: Callable[..., Any] | None = None

    @property
    def applied(self) -> bool:
        """Whether it is in place."""
        return self._wrapper is not None

    def apply(self) -> Self:
        """Put the wrapper into every loaded module of TransformerEngine that has the function."""
        modules = _modules_with(self._package, callable)
        if not modules:
            raise RuntimeError(
                f"no loaded module of {self._package} has {_NAME}: import transformer_engine.pytorch first, "
                "or give the package that has it"
            )
        original = modules[0].__dict__[_NAME]
        if hasattr(original, _MARK):
            raise RuntimeError("EmptyAfterRestore is applied already: undo() that one first")
        wrapper = _emptying(original)
        for module in modules:
            if module.__dict__[_NAME] is original:
                setattr(module, _NAME, wrapper)
        self._wrapper = wrapper
        return self

    def undo(self) -> None:
        """Restore the library's own function. Does nothing if the wrapper is not in place."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is None:
            return
        for module in _modules_with(self._package, lambda value: value is wrapper):
            setattr(module, _NAME, getattr(wrapper, _MARK))

    def __enter__(self) -> Self:
        return self.apply()

    def __exit__(self, *exception: object) -> None:
        self.undo()


def _modules_with(package: str, wanted: Callable[[Any], bool]) -> list[ModuleType]:
    return [module for _, module in Scene.loaded(package) if wanted(module.__dict__.get(_NAME))]


def _emptying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def restore_from_saved(tensors: Any, *arguments: Any, **options: Any) -> Any:
        restored = original(tensors, *arguments, **options)
        if type(tensors) is list and not _graph_is_kept():
            tensors.clear()
        return restored

    setattr(restore_from_saved, _MARK, original)
    return restore_from_saved


def _graph_is_kept() -> bool:
    """Whether the backward that runs in this thread keeps its graph; True outside a backward."""
    return bool(sys.modules["torch"]._C._autograd._get_current_graph_task_keep_graph())
