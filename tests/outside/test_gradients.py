"""Gradients of one instant, in a copy that was made at another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memtriage.outside import gradients
from memtriage.outside.gradients import Gradients, gradients_now, most_gradients
from memtriage.outside.memory import Words
from memtriage.outside.tensors import TorchReader
from support.outside_parts import heap_now, known_python, own_build

pytestmark = known_python


def _leaves(count: int) -> list[torch.Tensor]:
    return [torch.zeros(100 + at, requires_grad=True) for at in range(count)]


def _reader() -> TorchReader:
    return TorchReader(heap_now(), own_build()[2])


def _addresses(tensors: list[torch.Tensor]) -> Words:
    return np.array([tensor._cdata for tensor in tensors], np.int64)


def test_gradients_that_are_newer_than_the_copy_are_put_into_it() -> None:
    leaves = _leaves(3)
    reader = _reader()
    addresses = _addresses(leaves)
    assert reader.leaves(addresses).tolist() == addresses.tolist()
    for leaf in leaves[:2]:
        leaf.grad = torch.ones_like(leaf)
    found = gradients_now(reader, addresses)
    assert found.there.tolist() == [True, True, False]
    assert [reader.gradient(leaf._cdata) for leaf in leaves] == [0, 0, 0]
    memory = reader._memory
    for where, words in found.parts:
        memory.put(where, words)
    expected = [leaf.grad for leaf in leaves[:2]]
    assert [reader.gradient(leaf._cdata) for leaf in leaves] == [*(one._cdata for one in expected), 0]
    facts = [reader.storage(one._cdata) for one in expected]
    assert [(one.address, one.nbytes) for one in facts if one is not None] == [
        (one.data_ptr(), one.untyped_storage().nbytes()) for one in expected
    ]
    memory.copy_again(found.where[:1], np.array([8]))
    for leaf in leaves:
        leaf.grad = None
    assert reader.gradient(leaves[0]._cdata) == expected[0]._cdata  # whatever is copied again


def test_a_gradient_that_is_freed_meanwhile_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (leaf,) = _leaves(1)
    leaf.grad = torch.ones_like(leaf)
    reader, live = _reader(), TorchReader.live

    def frees(self: TorchReader, tensors: Words) -> object:
        found = live(self, tensors)
        leaf.grad = torch.ones_like(leaf)
        return found

    monkeypatch.setattr(TorchReader, "live", frees)
    assert gradients_now(reader, _addresses([leaf])).there.tolist() == [False]


def test_the_instant_with_most_gradients_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each look other leaves have one, and the fourth never."""
    instants = iter([[0], [0, 1], [2], []])

    def look(torch_reader: TorchReader, addresses: Words) -> Gradients:
        there = next(instants, [])
        for at, leaf in enumerate(leaves):
            leaf.grad = torch.ones_like(leaf) if at in there else None
        return gradients_now(torch_reader, addresses)

    leaves = _leaves(4)
    monkeypatch.setattr(gradients, "gradients_now", look)
    monkeypatch.setattr(gradients, "_ENOUGH_S", 60)
    looked = iter([False, False, False, True])
    found, ever = most_gradients(_reader(), _addresses(leaves), lambda: next(looked))
    assert found.there.tolist() == [True, True, False, False]
    assert ever.tolist() == [True, True, True, False]
