"""The remedy for TransformerEngine #1935, on a twin of its functions in pure torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memtriage.treat.te_restore import EmptyAfterRestore
from support.holder_standins import QuantizedLinear, QuantizedStorage, Stage, restore_from_saved

LAYERS = 4


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`linear` got the function by name, from the module that has it."""
    stage = Stage(monkeypatch)
    stage.module("transformer_engine.pytorch.quantized_tensor", restore_from_saved=restore_from_saved)
    linear = stage.module("transformer_engine.pytorch.module.linear", restore_from_saved=restore_from_saved)
    monkeypatch.setattr(
        QuantizedLinear, "restore", staticmethod(lambda *given: linear.__dict__["restore_from_saved"](*given))
    )
    yield linear


def full_copies() -> int:
    """Quantized copies of this process that have their data."""
    return sum(
        type(candidate) is QuantizedStorage and candidate._data is not None for candidate in gc.get_objects()
    )


def copies_after_backward(*, checkpointed: bool = False) -> tuple[int, torch.Tensor]:
    """Quantized copies that are alive when backward is done and the loss is not, and the gradient."""
    before = full_copies()
    torch.manual_seed(0)
    x = torch.randn(1000, requires_grad=True)
    out = x
    for _ in range(LAYERS):
        out = (
            checkpoint(QuantizedLinear.apply, out, use_reentrant=False)
            if checkpointed
            else QuantizedLinear.apply(out)
        )
    loss = out.sum()
    loss.backward()
    alive = full_copies() - before
    assert x.grad is not None and loss is not None
    return alive, x.grad


@pytest.mark.parametrize("checkpointed", [False, True])
def test_copies_are_released_after_backward(library: ModuleType, checkpointed: bool) -> None:
    gc.collect()
    left, gradient = copies_after_backward(checkpointed=checkpointed)
    assert left == LAYERS
    gc.collect()
    with EmptyAfterRestore():
        none, same = copies_after_backward(checkpointed=checkpointed)
    assert none == 0
    assert torch.equal(gradient, same)


def test_a_graph_that_is_kept_can_be_run_again(library: ModuleType) -> None:
    x = torch.ones(1000, requires_grad=True)
    with EmptyAfterRestore():
        loss = QuantizedLinear.apply(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert x.grad is not None and x.grad[0] == 4
    assert QuantizedLinear.restore is not None


def test_undo_puts_the_librarys_function_back_everywhere(library: ModuleType, monkeypatch: Any) -> None:
    remedy = EmptyAfterRestore().apply()
    assert remedy.applied
    wrapped = library.__dict__["restore_from_saved"]
    assert wrapped is not restore_from_saved and wrapped.__name__ == "restore_from_saved"
    later = Stage(monkeypatch).module("transformer_engine.pytorch.later", restore_from_saved=wrapped)
    remedy.undo()
    remedy.undo()
    assert not remedy.applied
    assert library.__dict__["restore_from_saved"] is restore_from_saved
    assert later.__dict__["restore_from_saved"] is restore_from_saved


def test_it_is_undone_when_the_block_fails(library: ModuleType) -> None:
    with pytest.raises(KeyError), EmptyAfterRestore():
        raise KeyError
    assert library.__dict__["restore_from_saved"] is restore_from_saved


def test_called_outside_of_a_backward_the_list_stays(library: ModuleType) -> None:
    objects = [None]
    with EmptyAfterRestore():
        assert library.__dict__["restore_from_saved"](objects, (3,)) == [3]
    assert objects == [None]


def test_without_the_library_or_twice_it_says_so(library: ModuleType, monkeypatch: Any) -> None:
    with EmptyAfterRestore(), pytest.raises(RuntimeError, match="applied already"):
        EmptyAfterRestore().apply()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"import transformer_engine\.pytorch first"):
        EmptyAfterRestore().apply()
