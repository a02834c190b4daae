"""One walk over this process: what is entered in which order, what waits, and where the budget ends it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from memtriage.observe.classes import variables_of
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.loaded_modules import modules
from memtriage.observe.walker import CensusBudget, HeapWalker


def walker_for(budget: CensusBudget | None = None) -> HeapWalker:
    """A walker that enters no module's variables but as a root."""
    walker = HeapWalker(HeapGraph(), budget)
    for module in modules():
        walker.fence(variables_of(module))
    return walker


def walked(module: ModuleType, budget: CensusBudget | None = None) -> HeapWalker:
    walker = walker_for(budget)
    walker.enter_module("train", module)
    walker.exhaust()
    walker.release()
    return walker


PROGRAM = """
import json
import numpy, torch
class Thing: pass
class SomeOptimizer:  # torch's own load half of torch at first
    step = zero_grad = None
    def __init__(self, groups): self.param_groups = groups
near = [1]
array = numpy.ones(4)
view = array[:2]
loss = torch.ones(4, requires_grad=True).exp()
node = loss.grad_fn
model = torch.nn.Linear(2, 2)
adam = SomeOptimizer(list(model.parameters()))
deep = [[model.weight]]
library, own = json.JSONDecoder, HeapWalker
things = Thing()
"""


def test_what_is_fenced_or_entered_is_not_entered_again(program: Any) -> None:
    program.run("one, other = [1], [2]\nboth = [one, other]")
    walker = walker_for()
    walker.fence(program["one"])
    walker.fence(program["one"])
    walker.enter_module("train", program.module)
    walker.enter_module("again", program.module)
    walker.fence(program["both"])
    walker.exhaust()
    walker.fence(program["other"])
    graph = walker.graph
    assert graph.root_names == {0: "train"}
    assert id(program["one"]) not in set(map(id, graph.objects))
    assert id(program["both"]) not in set(map(id, graph.objects))
    assert graph.objects[graph.index[id(program["other"])]] is program["other"]


def test_a_walk_ends_at_the_most_objects(program: Any) -> None:
    program.run("many = [[[number]] for number in range(10_000)]")
    graph = walked(program.module, CensusBudget(objects=10_000, wide=1 << 30)).graph
    assert graph.cut == (
        f"searched {len(graph.objects):,} of more than {graph.tracked:,} objects, "
        "the most that a census takes"
    )
    assert 10_000 < len(graph.objects) < 20_000
    assert walked(program.module, CensusBudget(objects=40_000, wide=1 << 30)).graph.cut is None


def test_a_walk_ends_when_its_time_is_over(program: Any) -> None:
    program.run("many = [[[number]] for number in range(10_000)]")
    walker = walked(program.module, CensusBudget(seconds=-1.0))
    graph = walker.graph
    assert graph.cut == (
        f"searched {len(graph.objects):,} of more than {graph.tracked:,} objects, "
        "in the longest time that a census takes"
    )
    assert walker.head == 4096


def test_containers_with_very_many_entries_are_walked_last(program: Any) -> None:
    program.run("many = [[number] for number in range(300)]\nfew = [[number] for number in range(200)]")
    small = CensusBudget(objects=1000, wide=250)
    walker = walked(program.module, small)
    graph = walker.graph
    assert [graph.objects[at] for at in walker.wide] == [program["many"]]
    assert id(program["few"][-1]) in graph.index
    assert id(program["many"][0]) not in graph.index
    walker.enter_wide()
    assert graph.objects[graph.parents[graph.index[id(program["many"][-1])]]] is program["many"]
    assert graph.cut is None
    whole = walked(program.module, CensusBudget(objects=1 << 40, wide=250))  # there is room for all
    assert id(program["many"][0]) in whole.graph.index


def test_entries_are_entered_or_wait_by_their_kind(program: Any) -> None:
    program.module.__dict__["HeapWalker"] = HeapWalker
    program.run(PROGRAM + "\nwide = [near, things, json, HeapWalker, node, adam, Thing, 1, library]")
    walker = walker_for()
    walker.enter_module("train", program.module)
    children = program["wide"]
    walker.enter_children(children, 0)
    graph = walker.graph
    assert graph.objects == [vars(program.module), program["near"], program["things"], program["Thing"]]
    assert graph.parents == [-1, 0, 0, -1]
    assert [(obj, at) for obj, at in walker.waiting_nodes] == [(program["node"], 0)]
    assert [(obj, at) for obj, at in walker.waiting_optimizers] == [(program["adam"], 0)]
    assert walker.library_classes == [program["library"]]
    walker.enter_children(children[:2], 0)
    assert len(graph.objects) == 4
    walker.release()
    assert (walker.waiting_nodes, walker.waiting_optimizers) == ([], [])
    assert graph.index[id(program["node"])] < graph.index[id(program["adam"])]


def test_tensors_models_and_optimizers_that_a_cut_walk_missed_are_rescued(program: Any) -> None:
    program.run(
        """
        import torch
        reached = torch.ones(4)
        model = torch.nn.Linear(2, 2)
        many = [[number] for number in range(10_000)]
        hidden = [[torch.ones(4), torch.nn.Linear(2, 2)], [[number] for number in range(10_000)]]
        class SomeOptimizer: step = zero_grad = None
        hidden.append(SomeOptimizer())
        """
    )
    walker = walked(program.module, CensusBudget(seconds=-1.0))
    graph = walker.graph
    (tensor, model), _, optimizer = program["hidden"]
    assert id(tensor) not in graph.index
    walker.rescue()
    at = {name: graph.index[id(value)] for name, value in (("t", tensor), ("m", model), ("o", optimizer))}
    assert at["t"] in graph.tensors and at["m"] in graph.modules and at["o"] in graph.optimizers
    assert {at["t"], at["m"]} <= graph.not_searched
    assert at["o"] not in graph.not_searched  # its holder was walked
    assert graph.index[id(program["reached"])] in graph.tensors
    assert graph.index[id(program["reached"])] not in graph.not_searched
    assert graph.index[id(program["model"])] in graph.modules
    assert len(graph.tensors) == len(set(graph.tensors))
    assert len({id(obj) for obj in graph.objects}) == len(graph.objects)
    assert walker.head == len(graph.objects)
    assert walker.everything.objects == []


def test_the_walks_own_lists_are_no_part_of_the_heap() -> None:
    walker = walker_for()
    own = [
        vars(walker.graph),
        walker.graph.objects,
        walker.waiting_nodes,
        walker.everything,
        walker.kinds.known,
    ]
    assert [walker.graph.index.get(id(each)) for each in own] == [-1] * len(own)
