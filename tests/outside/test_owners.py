"""What another process's memory says of each tensor's owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memtriage.account.ownership import PRIORITY
from memtriage.model.census import Owner
from memtriage.model.paths import in_words
from memtriage.outside.naming import RemoteNamer
from memtriage.outside.owners import owners_in
from support.outside_parts import known_python, walk_of
from support.owner_cases import CASES, PRELUDE

pytestmark = known_python


@pytest.fixture(scope="module")
def found(gallery: Callable[..., Any]) -> Any:
    """A program with all cases, and the strongest owner of each storage of it by its address."""
    program = gallery({case: source for case, (source, _) in CASES.items()}, PRELUDE)
    graph = walk_of({"train"}).run()
    owners_of = owners_in(graph, RemoteNamer(graph))
    owners: dict[int, Owner] = {}
    for at in graph.tensors:
        if (facts := graph.torch.storage(graph.objects[at])) is not None:
            owner = owners_of.of(at)
            owners[facts.address] = min(owner, owners.get(facts.address, owner), key=PRIORITY.index)
    return program, owners


PROGRAM = """
import torch
from torch import nn
def T(): return torch.ones(4)
class Wrapper(torch.Tensor):
    def __tensor_flatten__(self): return ["inner"], None
    @staticmethod
    def __new__(cls, inner):
        made = inner.new_empty(inner.shape).as_subclass(cls)
        made.inner = inner
        return made
class Plain(torch.Tensor): pass

model = nn.Linear(2, 2, bias=False)
model._buffers["deep"] = [T()]
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
model(torch.ones(2)).sum().backward()
optimizer.step()
optimizer.state["extra"] = {"blocks": [(T(),)]}
optimizer.near, optimizer.far = {"a": (T(),)}, [[[T()]]]
optimizer.single = T()
wrapped = nn.Module()
wrapped._parameters["weight"] = Wrapper(T())
plain = nn.Module()
plain._parameters["weight"] = Plain(T()).requires_grad_(False)
plain._parameters["weight"].note = T()
class Reducer: pass
Reducer.__module__ = "torch.distributed.reducer"
reducer = Reducer()
reducer.bucket = [T()]
class Sharded(torch.Tensor): pass
Sharded.__module__ = "torch.distributed.tensor"
sharded = T().as_subclass(Sharded)
sharded.note = T()
"""

EXPECTED = {
    "train.model.weight": "parameter",
    "train.model.weight.grad": "gradient",
    "train.model.deep[*]": "variable",
    "train.wrapped.weight": "parameter",
    "train.wrapped.weight._base": "parameter",
    "train.wrapped.weight.inner": "parameter",
    "train.plain.weight": "parameter",
    "train.plain.weight._base": "variable",
    "train.plain.weight.note": "variable",
    "train.optimizer.single": "optimizer state",
    "train.optimizer.near['a'][0]": "optimizer state",
    "train.optimizer.far[*][*]": "variable",
    "train.optimizer.state[*]['momentum_buffer']": "optimizer state",
    "train.optimizer.state['extra']['blocks'][*][0]": "optimizer state",
    "train.reducer.bucket[*]": "communication buffer",
    "train.sharded": "variable",
    "train.sharded._base": "variable",
    "train.sharded.note": "variable",
}


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"sparse gradient"}))  # which only C++ holds
def test_a_tensor_has_the_owner_that_the_census_inside_gives(found: Any, case: str) -> None:
    program, owners = found
    assert {owners[address] for address, noted in program._noted if noted == case} == {CASES[case][1]}


def test_each_tensor_of_a_program_has_its_owner(program: Any) -> None:
    program.run(PROGRAM)
    graph = walk_of({"train"}).run()
    namer = RemoteNamer(graph)
    found = owners_in(graph, namer)
    assert {in_words(namer.path(at).whole): found.of(at) for at in graph.tensors} == EXPECTED
