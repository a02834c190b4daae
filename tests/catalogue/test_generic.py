"""The generic detectors: what they call the places, and what they leave to others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memtriage.catalogue.catalogue import read_holders
from memtriage.catalogue.generic import GENERIC
from memtriage.catalogue.scene import Scene
from support.holder_standins import NBYTES, Scaled, tensor

PROGRAM_TABLE: dict[str, torch.Tensor] = {}


@pytest.fixture(autouse=True)
def only_new_objects() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    PROGRAM_TABLE.clear()
    gc.unfreeze()


def places(name: str) -> list[tuple[str, int]]:
    with Scene() as scene:
        holders = read_holders(scene, [entry for entry in GENERIC if entry.name == name])
    return holders[0].places if holders else []


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))
        self.weight_again = self.qkv.weight.data
        self.keys: Any = tensor()
        self.router = SimpleNamespace(probs=tensor(), weight=self.qkv.weight)


def test_module_attributes_have_paths_and_exclude_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), Attention())
    assert places("generic.module_attributes") == [("Sequential.1.keys", NBYTES)]
    assert places("generic.plain_objects") == [("Sequential.1.router", NBYTES)]
    del model


def test_variables_of_a_module_are_named_by_it() -> None:
    PROGRAM_TABLE["rope"] = tensor()
    assert (f"{__name__}.PROGRAM_TABLE", NBYTES) in places("generic.module_containers")


def test_an_lru_cache_is_named_by_its_function() -> None:
    @lru_cache
    def causal_mask(length: int) -> torch.Tensor:
        return tensor()

    causal_mask(3)
    ((path, nbytes),) = places("generic.lru_cache")
    assert path.endswith("causal_mask") and nbytes == NBYTES


def test_closures_and_default_arguments_are_told_apart() -> None:
    kept = tensor()

    def closed() -> torch.Tensor:
        return kept

    def defaulted(table: torch.Tensor = tensor(), *, other: Any = (tensor(),)) -> None: ...  # noqa: B008

    by_name = dict(places("generic.functions"))
    mine = {path.partition(" of ")[0]: nbytes for path, nbytes in by_name.items() if "told_apart" in path}
    assert mine == {"closure": NBYTES, "default arguments": 2 * NBYTES}
    del closed, defaulted


def test_variables_of_a_class_are_named_by_it_and_those_of_torch_are_left_to_its_entries() -> None:
    kept = {"kept": tensor(), "by_name": {"rope": tensor()}, "empty": {}, "count": 3}
    own = type("Registry", (), {"__module__": "train", **kept})
    of_torch = type("Table", (), {"__module__": "torch.nn.tables", "kept": tensor()})
    expected = [("train.Registry.by_name", NBYTES), ("train.Registry.kept", NBYTES)]
    assert sorted(places("generic.class_attributes")) == expected
    del own, of_torch


def test_a_context_is_told_by_its_function_where_it_has_tensors() -> None:
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.count = 3
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    class Plain(Counts):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    weight = torch.ones(1, requires_grad=True)
    kept = [Counts.apply(weight), Plain.apply(weight), Scaled.apply(weight)]
    assert places("generic.contexts") == [("ctx of ScaledBackward", NBYTES)]
    del kept
