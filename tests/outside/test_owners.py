"""What another process's memory says of each tensor's owner."""

from __future__ import annotations

from typing import Any

from memtriage.model.paths import in_words
from memtriage.outside.naming import RemoteNamer
from memtriage.outside.owners import owners_in
from support.outside_parts import known_python, walk_of

pytestmark = known_python

PROGRAM = """
import functools
import torch
from torch import nn
def T(): return torch.ones(4)
def leaf(): return torch.ones(4, requires_grad=True)
class Wrapper(torch.Tensor):
    def __tensor_flatten__(self): return ["inner"], None
    @staticmethod
    def __new__(cls, inner):
        made = inner.new_empty(inner.shape).as_subclass(cls)
        made.inner = inner
        return made
class Plain(torch.Tensor): pass
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.note = T()
        return x * 1
    @staticmethod
    def backward(ctx, g): return g

model = nn.Linear(2, 2, bias=False)
model.register_buffer("mean", T())
model.other = T()
model._buffers["deep"] = [T()]
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
model(torch.ones(2)).sum().backward()
optimizer.step()
optimizer.state["extra"] = {"blocks": [(T(),)]}
optimizer.near, optimizer.far = {"a": (T(),)}, [[[T()]]]
optimizer.single = T()
loss = leaf() * T()
wrapped = nn.Module()
wrapped._parameters["weight"] = Wrapper(T())
plain = nn.Module()
plain._parameters["weight"] = Plain(T()).requires_grad_(False)
plain._parameters["weight"].note = T()
custom = Function.apply(leaf())
@functools.cache
def cached(n): return T()
cached(1)
variable = T()
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
    "train.model.mean": "buffer",
    "train.model.deep[*]": "variable",
    "train.model.other": "variable",
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
    "train.loss": "variable",
    "train.loss -> grad_fn MulBackward0 -> saved other": "saved for backward",
    "train.loss -> grad_fn MulBackward0 -> … -> AccumulateGrad -> variable": "variable",
    "train.custom": "variable",
    "train.custom -> grad_fn FunctionBackward -> ctx.note": "autograd context",
    "train.custom -> grad_fn FunctionBackward -> … -> AccumulateGrad -> variable": "variable",
    "functools.lru_cache cached[*]": "known cache",
    "train.reducer.bucket[*]": "communication buffer",
    "train.variable": "variable",
    "train.sharded": "variable",
    "train.sharded._base": "variable",
    "train.sharded.note": "variable",
}


def test_each_tensor_of_a_program_has_its_owner(program: Any) -> None:
    program.run(PROGRAM)
    graph = walk_of({"train"}).run()
    namer = RemoteNamer(graph)
    found = owners_in(graph, namer)
    assert {in_words(namer.path(at).whole): found.of(at) for at in graph.tensors} == EXPECTED
