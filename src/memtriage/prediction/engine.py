"""What the autograd engine does in C++, with no Python in between.

The engine adds gradients that meet at one tensor into the first of them, where nothing else holds it
(`accumulate` in torch/csrc/autograd/input_buffer.cpp, torch 2.8 to 2.14). Under a dispatch mode it never
does, and adds out of place.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtriage.observe.origin import package_folder
from memtriage.prediction.operators import Args

ADD: Final = torch.ops.aten.add.Tensor

_ENGINE: Final = os.path.join("autograd", "graph.py")
"""Runs the autograd engine."""
_BETWEEN: Final = (package_folder(), os.path.join(os.path.dirname(torch.__file__), "_"))
"""What lies between it and here: the dispatch mode, and what torch wraps around one (`_dynamo`)."""
_USES_OF_STORAGE: Final = 2
"""Of a storage that one tensor alone has: by the tensor, and by the object that it is asked through."""


def called_by_engine() -> bool:
    """Whether an operator that is being dispatched was called by the engine's C++."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame.f_code.co_filename.endswith(_ENGINE)


def adds_in_place(args: Args, references: int) -> bool:
    """Whether an `aten::add` is one of the engine's that is done in the first gradient.

    Args:
        args: of the call.
        references: to the first of them, as `references_to_first` counted them when it was dispatched.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or len(args) != 2:
        return False
    first, second = args
    if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    alone: bool = (first._use_count(), references) == held_alone() and torch._C._storage_Use_Count(
        first.untyped_storage()._cdata
    ) == _USES_OF_STORAGE
    return alone and _is_dense(first) and called_by_engine()


def references_to_first(args: Args) -> int:
    """Count Python's references to the first argument: more than the call's own are variables.

    To be called first thing in `__torch_dispatch__`.
    """
    return sys.getrefcount(args[0])


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _ReferenceCounter(TorchDispatchMode):  # type: ignore[misc]
    """Notes how often the first operand of an addition within backward is referred to."""

    found: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ADD and torch._C._current_graph_task_id() != -1:
            references = references_to_first(args)
            self.found = args[0]._use_count(), references
        return func(*args, **kwargs or {})


@functools.cache
def held_alone() -> tuple[int, int] | None:
    """How often a gradient that only the engine holds is referred to in dispatch, by C++ and by Python.

    It depends on the versions of torch and Python, so a small graph is looked at; not within backward.
    """
    given = torch.ones(2, device="cpu", requires_grad=True)
    with torch.enable_grad(), _ReferenceCounter() as look:
        held = given * 2
        (held + held.sin()).sum().backward()
    found: tuple[int, int] | None = look.found
    return found
