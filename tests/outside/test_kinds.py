"""How objects of another process are walked is decided by their class, as in the process itself."""

from __future__ import annotations

import collections
import sys
import types
from typing import Any

import numpy as np
import pytest
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
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.kinds import Kinds
from support.outside_parts import heap_now, known_python, same

pytestmark = known_python


class Steps:
    step = zero_grad = None


class ZeroOptimizer(Steps):
    pass


class HalfOptimizer:
    step = None


class Subclass(torch.Tensor):
    pass


class Meta(type):
    pass


class Array(np.ndarray):  # type: ignore[type-arg]
    pass


class Lazy(types.ModuleType):
    pass


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


OF_TREATMENT = type("Treated", (), {"__module__": "memtriage.treat.parking"})
LIKE_MEMTRIAGE = type("Other", (), {"__module__": "memtriage_like"})


def leaf() -> torch.Tensor:
    return torch.ones(1, requires_grad=True)


CASES: list[tuple[type, int]] = [
    (torch.Tensor, TENSOR),
    (torch.nn.Parameter, TENSOR),
    (Subclass, TENSOR),
    (type, KLASS),
    (Meta, KLASS),
    (types.ModuleType, BOUNDARY),
    (Lazy, BOUNDARY),
    (RemoteGraph, BOUNDARY),
    (OF_TREATMENT, PLAIN),
    (LIKE_MEMTRIAGE, PLAIN),
    (type(leaf().exp().grad_fn), NODE),
    (type(Function.apply(leaf()).grad_fn), NODE),
    (_Holder, PLACEHOLDER),
    (torch.nn.Linear, MODULE),
    (torch.optim.AdamW, OPTIMIZER),
    (ZeroOptimizer, OPTIMIZER),
    (HalfOptimizer, PLAIN),
    (Steps, PLAIN),
    (np.ndarray, ARRAY),
    (Array, ARRAY),
    (dict, PLAIN),
    (collections.deque, PLAIN),
    (types.FrameType, PLAIN),
    *((atom, ATOM) for atom in (int, str, bytes, float, type(None), types.CodeType, types.GenericAlias)),
]


@pytest.mark.parametrize(("klass", "kind"), CASES, ids=[klass.__name__ for klass, _ in CASES])
def test_objects_are_walked_by_their_class(klass: type, kind: int) -> None:
    kinds = Kinds(heap_now(), same)
    assert kinds.of_class(id(klass)) == kind
    assert kinds.known[id(klass)] == kind
    assert KindTable()[klass] == kind  # and inside


def test_what_is_no_class_is_not_walked() -> None:
    kinds = Kinds(heap_now(), same)
    assert [kinds.of_class(address) for address in (0, id("text"), id(sys.modules))] == [ATOM] * 3


def test_only_atoms_whose_place_is_known_are_known_at_once() -> None:
    elsewhere = 1 << 40
    kinds = Kinds(heap_now(), lambda own: elsewhere if own == id(int) else None)
    assert kinds.known == {elsewhere: ATOM}
    assert kinds.of_class(id(str)) == PLAIN
