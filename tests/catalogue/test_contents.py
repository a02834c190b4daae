"""Which storages are inside a value: containers, subclasses, plain objects; each once, and nothing else's."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.catalogue.contents import cached_values, storages_in
from memtriage.observe.tensors import undisturbed
from support.holder_standins import NBYTES, CachingTensor, QuantizedStorage, tensor


def held(value: Any, **options: int) -> int:
    with undisturbed():
        return sum(facts.nbytes for facts, _ in storages_in([value], **options))


class Slotted:
    __slots__ = ("kept", "unset")

    def __init__(self) -> None:
        self.kept = tensor()


@dataclass
class Plain:
    kept: Any


def subclass_instance() -> CachingTensor:
    made = CachingTensor(tensor())
    made._transpose = tensor()
    return made


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (tensor(), 1),
        ({"a": tensor(), "b": [tensor(), (tensor(),)]}, 3),
        (OrderedDict(a=tensor()), 1),
        (deque([tensor()]), 1),
        ({1: frozenset([2])}, 0),
        (Plain(Plain([tensor()])), 1),
        (Slotted(), 1),
        (types.SimpleNamespace(a=tensor()), 1),
        (QuantizedStorage(tensor()), 1),
        (subclass_instance(), 2),
        (None, 0),
        ("text", 0),
    ],
)
def test_tensors_are_found_wherever_a_library_puts_them(value: Any, count: int) -> None:
    assert held(value) == count * NBYTES


def test_modules_functions_and_classes_are_not_entered() -> None:
    kept = tensor()

    class Klass:
        table = kept

    layer = torch.nn.Linear(100, 100)
    assert held([layer, Klass, lambda: kept, types]) == 0


def test_views_and_aliases_count_once_and_meta_tensors_never() -> None:
    one = tensor()
    assert held([one, one.view(-1), one[:3], one.detach(), torch.empty(9, device="meta")]) == NBYTES


def test_a_sparse_tensor_is_its_parts() -> None:
    sparse = torch.eye(100).to_sparse()
    assert held(sparse) == sparse._indices().nbytes + sparse._values().nbytes


def test_what_refers_to_itself_ends() -> None:
    loop: list[Any] = [tensor()]
    loop.append(loop)
    assert held(loop) == NBYTES


@given(depth=st.integers(1, 9))
def test_a_value_is_looked_into_so_deep_and_no_deeper(depth: int) -> None:
    value: Any = tensor()
    for _ in range(depth - 1):
        value = [value]
    assert held(value, depth=4) == (NBYTES if depth <= 4 else 0)


@pytest.mark.parametrize("bound", [None, 3])
def test_a_bounded_and_an_unbounded_lru_cache_give_their_values(bound: int | None) -> None:
    @functools.lru_cache(maxsize=bound)
    def table(key: int) -> torch.Tensor:
        return tensor()

    for key in range(5):
        table(key)
    kept = 5 if bound is None else bound
    assert sum(isinstance(value, torch.Tensor) for value in cached_values(table)) == kept
    assert held(table) == kept * NBYTES
    table.cache_clear()
    assert held(table) == 0
