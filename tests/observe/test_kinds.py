"""How objects are walked is decided by their type alone."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import _Holder

from memtriage.observe.kinds import (
    ARRAY,
    ATOM,
    FUTURE,
    LOCALS,
    MODULE,
    OPTIMIZER,
    PLACEHOLDER,
    PLAIN,
    SAVED,
    TENSOR,
    FrameLocals,
    KindTable,
)
from support.kind_cases import KIND_CASES, KIND_NAMES

OF_THIS_PROCESS = [
    (FrameLocals, LOCALS),
    (torch.futures.Future, FUTURE),
    (torch._C.Future, FUTURE),
    (torch._C._autograd.SavedTensor, SAVED),
]


@pytest.mark.parametrize(
    ("klass", "kind"),
    [*KIND_CASES, *OF_THIS_PROCESS],
    ids=[*KIND_NAMES, *(klass.__name__ for klass, _ in OF_THIS_PROCESS)],
)
def test_objects_are_walked_by_their_type(klass: type, kind: int) -> None:
    kinds = KindTable()
    assert (kinds[klass], kinds.known[id(klass)], kinds[klass]) == (kind, kind, kind)


def test_an_object_is_classified_by_its_type() -> None:
    kinds = KindTable()
    assert (kinds.classify([]), kinds.classify(torch.ones(1)), kinds.classify("text")) == (
        PLAIN,
        TENSOR,
        ATOM,
    )
    assert kinds.known[id(list)] == PLAIN


@pytest.mark.parametrize(
    ("module", "klass", "kind"),
    [
        ("torch", torch.Tensor, TENSOR),
        ("torch", torch.futures.Future, FUTURE),
        ("numpy", np.ndarray, ARRAY),
        ("torch.nn", torch.nn.Linear, MODULE),
        ("torch.optim", torch.optim.AdamW, OPTIMIZER),
        ("torch.utils.checkpoint", _Holder, PLACEHOLDER),
        ("torch._C._autograd", torch._C._autograd.SavedTensor, SAVED),
    ],
)
def test_without_a_library_its_objects_are_walked_as_any_other(
    monkeypatch: pytest.MonkeyPatch, module: str, klass: type, kind: int
) -> None:
    assert KindTable()[klass] == kind
    monkeypatch.delitem(sys.modules, module)
    assert KindTable()[klass] == PLAIN


def test_a_name_that_is_no_class_in_this_version_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.checkpoint, "_Holder", lambda: None)
    assert KindTable()[_Holder] == PLAIN


def test_variables_of_a_function_are_those_that_have_a_value() -> None:
    first, second = [1], "two"
    del second
    found = FrameLocals(sys._getframe(), "loader")
    assert (found.names, found.thread) == (["first"], "loader")
    assert found.values[0] is first and len(found.values) == 1
    assert found.code is sys._getframe().f_code
