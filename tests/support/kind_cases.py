"""Classes, and how a walk over a heap treats their objects: in this process and in another one."""

from __future__ import annotations

import collections
import types
from typing import Any, Final

import numpy as np
import torch
from torch.utils.checkpoint import _Holder

from memtriage.observe.kinds import (
    ARRAY,
    ATOM,
    BOUNDARY,
    KLASS,
    MODULE,
    NODE,
    OPTIMIZER,
    PLACEHOLDER,
    PLAIN,
    TENSOR,
    KindTable,
)


class Steps:
    step = zero_grad = None


class ZeroOptimizer(Steps):
    """As DeepSpeed's and Apex's wrappers: no subclass of torch's optimizers."""


class OnlyStepsOptimizer:
    step = None


class OnlyClearsOptimizer:
    zero_grad = None


class Subclass(torch.Tensor):
    pass


class Meta(type):
    pass


class Array(np.ndarray):  # type: ignore[type-arg]
    pass


class LazyModule(types.ModuleType):
    pass


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class SubclassOfPlaceholder(_Holder):
    pass


def _of(module: str) -> type:
    return type(f"Of_{module}", (), {"__module__": module})


def _node(tensor: torch.Tensor) -> type:
    return type(tensor.grad_fn)


_LEAF: Final = torch.ones(1, requires_grad=True)

KIND_CASES: Final[list[tuple[type, int]]] = [
    (torch.Tensor, TENSOR),
    (torch.nn.Parameter, TENSOR),
    (Subclass, TENSOR),
    (type, KLASS),
    (Meta, KLASS),
    (types.ModuleType, BOUNDARY),
    (LazyModule, BOUNDARY),
    (KindTable, BOUNDARY),
    (_of("memtriage"), BOUNDARY),
    (_of("memtriage.treat.parking"), PLAIN),
    (_of("memtriage_like"), PLAIN),
    (_node(_LEAF.exp()), NODE),
    (_node(Function.apply(_LEAF)), NODE),
    (_Holder, PLACEHOLDER),
    (SubclassOfPlaceholder, PLAIN),
    (torch.nn.Linear, MODULE),
    (torch.optim.AdamW, OPTIMIZER),
    (ZeroOptimizer, OPTIMIZER),
    (OnlyStepsOptimizer, PLAIN),
    (OnlyClearsOptimizer, PLAIN),
    (Steps, PLAIN),
    (np.ndarray, ARRAY),
    (Array, ARRAY),
    (dict, PLAIN),
    (collections.deque, PLAIN),
    (types.FrameType, PLAIN),
    *((atom, ATOM) for atom in (int, str, bytes, float, type(None), types.CodeType, types.GenericAlias)),
]
KIND_NAMES: Final = [klass.__name__ for klass, _ in KIND_CASES]
