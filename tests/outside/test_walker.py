"""The walk over another process's objects reaches what the walk inside reaches, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from memtriage.observe.classes import variables_of
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import KLASS, NODE, TENSOR
from memtriage.observe.loaded_modules import modules
from memtriage.observe.walker import HeapWalker
from memtriage.outside import walker
from memtriage.outside.own_memory import own_words
from memtriage.outside.walker import RemoteWalker
from memtriage.process.collector import collector_paused
from support.outside_parts import known_python, never, own_build, walker_now

pytestmark = known_python

PROGRAM = """
import collections, functools, json, types
import numpy, torch
from memtriage.outside.walker import RemoteWalker
from torch import nn

def T(): return torch.ones(4)
def leaf(): return torch.ones(4, requires_grad=True)
class Thing:
    def __init__(self, t=None): self.t = t
class Slots: __slots__ = ("one", "other")
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 1)
        ctx.note = [T()]
        return x * 1
    @staticmethod
    def backward(ctx, g): return g
class SomeOptimizer:  # torch's own load half of torch at first
    step = zero_grad = None
    def __init__(self, parameters):
        self.param_groups = [{"params": parameters}]
        self.state = {each: {"momentum_buffer": T()} for each in parameters}
class Made(nn.Module):
    shared = [T()]
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(COUNT))
        self.register_buffer("mean", T())
@functools.cache
def cached(n): return T()
def with_default(x=[T()], *, y={"a": T()}): pass
def outer():
    kept = [T()]
    def inner(): return kept
    return inner

model = Made()
model.layers[0](torch.ones(2)).sum().backward()
optimizer = SomeOptimizer(list(model.parameters()))
losses = [(leaf() * T()).sin() for _ in range(COUNT)]
trained = []
for _ in range(COUNT):
    trained.append(leaf())
    (trained[-1] * 2).sum().backward()
views = [T()[:2] for _ in range(COUNT)]
nodes = [(leaf() * T()).grad_fn for _ in range(COUNT)]
customs = [Function.apply(leaf()) for _ in range(COUNT)]
with torch.autograd.graph.saved_tensors_hooks(lambda t: [t.clone()], lambda kept: kept[0]):
    packed = [leaf() * T() for _ in range(COUNT)]
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda kept: kept):
    copied = [leaf() * T() for _ in range(COUNT)]
things = [Thing([T()]) for _ in range(COUNT)]
arrays = [numpy.ones(3)[:2] for _ in range(COUNT)] + [T().numpy() for _ in range(COUNT)]
table = {i: (i, [T()]) for i in range(COUNT)}
calls = [outer() for _ in range(COUNT)]
classes = [type(f"Local{i}", (), {"__module__": "train", "held": [T()]}) for i in range(COUNT)]
libraries = [json.JSONDecoder, collections.Counter, RemoteWalker]
carriers = [T() for _ in range(COUNT)]
for carrier in carriers: carrier.extra = [T()]
shared = [carriers, views, things]
cached(1), cached(2)
"""


def walked_inside(module: ModuleType) -> HeapWalker:
    found = HeapWalker(HeapGraph())
    for other in modules():
        found.fence(variables_of(other))
    found.enter_module("train", module)
    found.exhaust()
    found.release()
    return found


def walked(module: ModuleType, is_late: Callable[[], bool] = never) -> RemoteWalker:
    found = walker_now(is_late)
    found.enter_module("train", id(module))
    found.exhaust()
    found.release()
    return found


def address(obj: Any, kind: int) -> int:
    """What an object is known by from outside: C++'s address for tensors and nodes."""
    if kind == TENSOR:
        return int(obj._cdata)
    if kind != NODE:
        return id(obj)
    offset = (
        own_build()[2].function_node if isinstance(obj, torch.autograd.function.BackwardCFunction) else 16
    )
    return own_words(id(obj) + offset, 1)[0]


def steps(objects: Sequence[int], kinds: Sequence[int], parents: Sequence[int]) -> list[tuple[int, int, int]]:
    """(object, its kind, its holder) of each object in the order of a walk, without what nodes save.

    Inside, each look at what a node saves makes new tensors, and a tuple of them.
    """
    left_out, found = set[int](), []
    for at, (obj, kind, parent) in enumerate(zip(objects, kinds, parents, strict=True)):
        saved = parent >= 0 and kinds[parent] == NODE and kind != NODE
        if parent in left_out or saved:
            left_out.add(at)
        else:
            found.append((obj, kind, objects[parent] if parent >= 0 else -1))
    return found


@pytest.mark.parametrize("count", [1, 7, 100])
def test_the_same_objects_through_the_same_holders_as_inside(program: Any, count: int) -> None:
    program.run(f"COUNT = {count}")
    program.run(PROGRAM)
    with collector_paused():
        outer = walked(program.module)
        inner = walked_inside(program.module)
        graph, expected = outer.graph, inner.graph
        kinds = [expected.kind(at) for at in range(len(expected.objects))]
        addresses = [address(obj, kind) for obj, kind in zip(expected.objects, kinds, strict=True)]
    assert steps(graph.objects, graph.kinds, graph.parents) == steps(addresses, kinds, expected.parents)
    assert graph.root_names == expected.root_names
    libraries = [klass.name for klass in outer.library_classes]
    assert {"Counter", "JSONDecoder", "Function"} <= set(libraries)
    assert not {"Thing", "Made", "RemoteWalker"} & set(libraries)
    assert len(libraries) == len(set(libraries))

    def listed(objects: Sequence[int], positions: Sequence[int]) -> list[int]:
        return [objects[at] for at in positions]

    assert listed(graph.objects, graph.modules) == listed(addresses, expected.modules)
    assert listed(graph.objects, graph.optimizers) == listed(addresses, expected.optimizers)
    assert listed(graph.objects, graph.nodes) == listed(addresses, expected.nodes)
    assert graph.tensors == [at for at, kind in enumerate(graph.kinds) if kind == TENSOR]


def test_many_nodes_at_once_lead_to_the_same_as_one_by_one(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.run("COUNT = 100")
    program.run(PROGRAM)
    program.run("deep = [torch.stack((leaf() * T()).tanh().split(2)).sum() for _ in range(COUNT)]")
    graphs = [walked(program.module).graph]
    monkeypatch.setattr("memtriage.outside.walker._FEW", 10**9)
    graphs.append(walked(program.module).graph)
    at_once, alone = [
        (graph.objects, graph.kinds, graph.parents, graph.nodes, graph.tensors, graph.saved)
        for graph in graphs
    ]
    assert at_once == alone
    assert len(graphs[0].nodes) > 1000 and len(graphs[0].saved) > 200


def test_a_walk_ends_when_its_time_is_over_and_says_how_far_it_came(program: Any) -> None:
    program.run("things = [[number] for number in range(10_000)]")
    looks = iter([False, True])
    graph = walked(program.module, looks.__next__).graph
    assert graph.cut is not None
    assert graph.cut == f"searched {len(graph.objects):,} objects until the time was over"
    assert list(looks) == []
    whole = walked(program.module).graph
    assert whole.cut is None
    assert len(whole.objects) > 10_000


def test_a_walk_takes_no_more_than_the_most_objects(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program.run("things = [[[number]] for number in range(10_000)]")
    monkeypatch.setattr(walker, "MOST_OBJECTS", 10_001)
    graph = walked(program.module).graph
    assert graph.cut is not None
    assert graph.cut.endswith(" objects, the most that a census from outside takes")
    assert 10_001 < len(graph.objects) < 20_000


def test_what_is_skipped_is_not_walked(program: Any) -> None:
    program.run("things = [[1]]")
    found = walker_now()
    found.enter_module("train", id(program.module))
    found.skip()
    found.exhaust()
    assert found.graph.objects == [id(vars(program.module))]
    found.enter_module("again", id(program.module))  # as `os.path` is also `posixpath`
    assert found.graph.root_names == {0: "train"}


def test_a_class_is_a_root_by_its_name(program: Any) -> None:
    program.run("class Outer:\n    class Inner:\n        held = [1]")
    found = walker_now()
    klass = found.graph.heap.class_at(id(program["Outer"].Inner))
    assert klass is not None
    found.enter_class(klass)
    assert found.graph.root_names == {0: "train.Outer.Inner"}
    assert (found.graph.kinds, found.graph.parents) == ([KLASS], [-1])


def test_the_clock_is_looked_at_again_where_one_object_leads_to_the_next(program: Any) -> None:
    program.run("head = None\nfor _ in range(9000): head = [head]")
    looks = iter([False, True])
    graph = walked(program.module, looks.__next__).graph
    assert list(looks) == []
    assert 4096 < len(graph.objects) < 4200


def test_what_nodes_save_is_noted_and_entered(program: Any) -> None:
    program.run(
        """
        import torch
        from torch.autograd.graph import saved_tensors_hooks
        def T(): return torch.ones(4)
        def leaf(): return torch.ones(4, requires_grad=True)
        listed, copies = [], []
        def into_list(t):
            listed.append([t.clone()])
            return listed[-1]
        def as_tensor(t):
            copies.append(t.clone())
            return copies[-1]
        factor = T()
        product = leaf() * factor
        with saved_tensors_hooks(into_list, lambda kept: kept[0]): packed = leaf() * T()
        with saved_tensors_hooks(as_tensor, lambda kept: kept): copied = leaf() * T()
        kept = [id(each) for each in listed], [each._cdata for each in copies]
        inner = [each[0]._cdata for each in listed]
        listed.clear(), copies.clear()
        """
    )
    found = walked(program.module)
    graph = found.graph
    lists, copies = program["kept"]
    assert graph.saved == {program["factor"]._cdata, *copies}
    nodes = {name: graph.objects.index(address(program[name].grad_fn, NODE)) for name in ("packed", "copied")}
    holders = dict(zip(graph.objects, graph.parents, strict=True))
    assert [holders[each] for each in lists] == [nodes["packed"]]
    assert [holders[each] for each in copies] == [nodes["copied"]]
    assert [graph.objects[holders[each]] for each in program["inner"]] == lists
    assert 0 not in holders
