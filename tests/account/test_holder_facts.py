"""Facts about a holder from the objects around it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memtriage.account.holder_facts import (
    backward_ran,
    collects,
    differentiates,
    has_no_graph,
    holder_facts,
    leads_to,
    packs_itself,
    program_files,
    store_of,
)
from memtriage.model.paths import ANY_ITEM, PathSegment, SegmentKind
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import FrameLocals
from memtriage.observe.store_statements import Store
from support.heaps import heap_of
from support.paths import attribute, of_module
from support.torch_state import shows_saved_tensors

shown = shows_saved_tensors()

HELPER = """
import sys

class Base:
    pass
class Shelf(Base):
    def add(self): pass
class Rack(Base):
    pass
def add(item): pass
def items():
    yield sys._getframe()
async def later(): pass
async def several():
    yield 1
def running():
    return sys._getframe()
kept = []
kept.append(Rack())
"""


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A module of the program, with a file of its own."""
    module = types.ModuleType("helper")
    module.__file__ = str(tmp_path / "helper.py")
    (tmp_path / "helper.py").write_text(HELPER)
    exec(compile(HELPER, module.__file__, "exec"), module.__dict__)
    sys.modules["helper"] = module
    yield module
    del sys.modules["helper"]


def test_classes_are_those_on_the_way_the_holders_first(helper: types.ModuleType) -> None:
    class Mine(nn.Linear):
        pass

    store, kept = helper.Shelf(), []
    graph = heap_of([{"__name__": "helper"}, Mine(1, 1), {}, store, kept], root="elsewhere.x")
    assert holder_facts(graph, 4).classes == [
        "helper.Shelf",
        "helper.Base",
        f"{__name__}.{Mine.__qualname__}",
        "torch.nn.modules.linear.Linear",
        "torch.nn.modules.module.Module",
    ]
    assert holder_facts(graph, 2).classes[0] == f"{__name__}.{Mine.__qualname__}"
    assert holder_facts(graph, 0).classes == []


def test_of_a_class_that_is_a_root_its_own_name_counts(helper: types.ModuleType) -> None:
    graph = heap_of([helper.Shelf, []], root="helper.Shelf")
    assert holder_facts(graph, 1).classes == ["helper.Shelf"]
    assert holder_facts(graph, 1).files == [helper.__file__]
    graph = heap_of([helper.Shelf(), []], root="helper.store")
    assert holder_facts(graph, 1).classes == ["helper.Shelf", "helper.Base"]


SOURCES: dict[str, Callable[[Any], Any]] = {
    "an object": lambda helper: helper.Shelf(),
    "a class": lambda helper: helper.Shelf,
    "a function": lambda helper: helper.add,
    "a method": lambda helper: helper.Shelf().add,
    "a generator": lambda helper: helper.items(),
    "an asynchronous generator": lambda helper: helper.several(),
    "the variables of a function": lambda helper: FrameLocals(helper.running(), None),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_the_file_that_defines_what_leads_to_a_holder_is_told(
    helper: types.ModuleType, make: Callable[[Any], Any]
) -> None:
    graph = heap_of([{}, make(helper), []], root="")
    assert holder_facts(graph, 2).files == [helper.__file__]
    assert holder_facts(graph, 0).files == []


def test_the_file_of_a_coroutine_is_told(helper: types.ModuleType) -> None:
    coroutine = helper.later()
    assert holder_facts(heap_of([coroutine, []], root="x"), 1).files == [helper.__file__]
    coroutine.close()


@pytest.mark.parametrize(
    ("root", "namespace", "told"),
    [
        ("helper.cache", {}, True),
        ("helper", {"__name__": "helper"}, True),
        ("other.cache", {"__name__": "helper"}, True),
        ("helper.cache", {"__name__": 5}, True),
        ("helper.cache", {"__name__": "nowhere"}, False),
        ("nowhere.cache", {}, False),
        ("torch.cache", {}, False),
        ("sys.cache", {}, False),
    ],
)
def test_the_file_of_the_module_that_a_root_is_in_is_told(
    helper: types.ModuleType, root: str, namespace: dict[str, object], told: bool
) -> None:
    graph = heap_of([namespace, []], root=root)
    assert holder_facts(graph, 1).files == ([helper.__file__] if told else [])


def test_an_optimizer_on_the_way_is_told() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)])
    graph = heap_of([{}, optimizer, {}, []])
    assert [holder_facts(graph, at).in_optimizer for at in range(4)] == [False, True, True, True]


def test_files_of_the_program_are_those_of_its_modules(helper: types.ModuleType) -> None:
    files = program_files()
    assert helper.__file__ in files
    assert torch.__file__ not in files
    assert sys.modules["memtriage"].__file__ not in files
    helper.__file__ = None
    assert None not in program_files()


def test_a_store_is_sought_in_the_files_of_the_holder_and_without_any_a_call_in_those_of_the_program(
    helper: types.ModuleType,
) -> None:
    assert helper.__file__ is not None
    of_list = (*of_module("helper", "kept"), ANY_ITEM)
    of_class = (PathSegment(SegmentKind.CLASS, "helper.Rack"), *attribute("all"), ANY_ITEM)
    lines = HELPER.splitlines()
    appended = Store(helper.__file__, 1 + lines.index("kept.append(Rack())"), "Rack()")
    assert store_of(of_list, [helper.__file__]) == appended
    assert store_of(of_list, []) is None
    assert store_of(of_class, []) == Store(helper.__file__, appended.line, None)
    assert store_of(of_class, [helper.__file__]) is None


def test_of_several_stores_the_one_that_allocates_is_told(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("kept = {}\nkept['a'] = one()\nkept['b'] = two()\n")
    anchor = (*of_module("train", "kept"), ANY_ITEM)
    assert store_of(anchor, [str(file)]) is None
    assert store_of(anchor, [str(file)], "train.py:3 in two") == Store(str(file), 3, "two()")


# --- what is collected --------------------------------------------------------------------------------------


def modules_in(kept: list[Any]) -> tuple[HeapGraph, list[int]]:
    """A heap of modules or optimizers in a list, and the positions of an object in each."""
    graph = heap_of(*([kept, each, {}] for each in kept))
    return graph, [at for at, obj in enumerate(graph.objects) if type(obj) is dict]


def linear() -> nn.Module:
    return nn.Linear(1, 1)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.ones(1)])


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ([], None),
        ([linear, linear], None),
        ([linear, linear, linear], "module"),
        ([sgd, sgd], None),
        ([sgd, sgd, sgd], "optimizer"),
        ([linear, linear, linear, sgd], None),
        ([sgd, sgd, sgd, linear], None),
        ([list, list, list], None),
        ([list, linear, linear, linear], "module"),
    ],
)
def test_several_modules_or_optimizers_are_a_collection(
    kept: list[Callable[[], Any]], expected: str | None
) -> None:
    assert collects(*modules_in([make() for make in kept])) == expected


def test_parts_of_one_module_are_no_collection() -> None:
    model = nn.Sequential(linear(), linear(), linear())
    graph = heap_of(*([model, {}, each, {}, each.weight] for each in model))
    assert collects(graph, graph.tensors) is None
    outer = [model, nn.Sequential(linear()), nn.Sequential(linear())]
    graph = heap_of(*([outer, each, {}, each[0], {}, each[0].weight] for each in outer))
    assert collects(graph, graph.tensors) == "module"


# --- graphs -------------------------------------------------------------------------------------------------


def leaf(size: int = 3) -> torch.Tensor:
    return torch.ones(size, requires_grad=True)


def nodes_of(result: torch.Tensor) -> list[Any]:
    """The nodes of a tensor's graph, without those that accumulate gradients."""
    found = [result.grad_fn]
    for node in found:
        found += [
            after
            for after, _ in node.next_functions
            if after is not None and "Accumulate" not in after.name() and after not in found
        ]
    return found


def of_nodes(*nodes: Any) -> HeapGraph:
    return heap_of([list(nodes)], *([*nodes[: at + 1]] for at in range(len(nodes))))


def test_the_graph_of_a_gradient_is_told() -> None:
    x = torch.nn.Parameter(leaf())
    result = x.sigmoid().sum()
    (slope,) = torch.autograd.grad(result, x, create_graph=True)
    once, twice = of_nodes(*nodes_of(result)), of_nodes(*nodes_of(slope))
    assert not differentiates(once, once.nodes)
    assert differentiates(twice, twice.nodes)
    assert not differentiates(twice, [])


@pytest.mark.parametrize(("make", "needed"), [(leaf, True), (lambda: torch.nn.Parameter(leaf()), False)])
def test_a_gradient_of_an_input_is_needed(make: Callable[[], torch.Tensor], needed: bool) -> None:
    node = make().exp().grad_fn
    assert node is not None
    graph = of_nodes(node, node.next_functions[0][0])
    assert differentiates(graph, graph.nodes) is needed


def test_a_tensor_has_a_graph_or_none() -> None:
    x = leaf()
    assert [has_no_graph(each) for each in (x, x.detach(), x.exp())] == [True, True, False]


@shown
@pytest.mark.parametrize(
    ("freed", "filled", "ran"), [(0, 0, False), (1, 0, True), (1, 1, False), (2, 1, True), (1, 2, False)]
)
def test_a_backward_ran_where_most_nodes_have_lost_what_they_saved(
    freed: int, filled: int, ran: bool
) -> None:
    done, waiting = [leaf().exp() for _ in range(freed)], [leaf().exp() for _ in range(filled)]
    for each in done:
        each.sum().backward()
    sums = [leaf().sum() for _ in range(300)]  # save nothing
    graph = heap_of(*([each.grad_fn] for each in [*sums, *waiting, *done]))
    assert backward_ran(graph, graph.nodes) is ran


@pytest.mark.parametrize(
    ("own", "others", "leads"),
    [
        # nodes of the tensor's own graph among those asked for, further nodes of its graph
        (3, 0, True),
        (2, 1, True),
        (2, 2, False),
        (1, 2, False),
    ],
)
def test_a_tensor_leads_to_nodes_that_are_most_of_its_graph(own: int, others: int, leads: bool) -> None:
    result = torch.ones(1, requires_grad=False)
    weights = torch.ones(1, requires_grad=True)
    result = weights.view(1)
    for _ in range(own + others - 2):
        result = result.exp()
    # ends in a node that accumulates the gradient of the weights
    mine = nodes_of(result)
    graph = heap_of([result], *([node] for node in mine))
    assert len(mine) == own + others - 1
    assert leads_to(graph, 0, graph.nodes[:own]) is leads


@shown
def test_a_node_that_saves_the_very_tensor_it_made_is_found() -> None:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        packed = leaf().sigmoid()
        after = packed.sum()
    plainly = leaf().sigmoid()
    saved = plainly.grad_fn._saved_result
    graph = heap_of([packed.grad_fn, packed], [plainly.grad_fn, saved], [[], after], [after])
    at = {id(obj): position for position, obj in enumerate(graph.objects)}
    assert packs_itself(graph, [at[id(packed)]])
    assert packs_itself(graph, [at[id(saved)], at[id(packed)]])
    assert not packs_itself(graph, [at[id(saved)]])
    assert not packs_itself(graph, [])
    assert packs_itself(heap_of([packed]), [0])
    inside = heap_of([packed.grad_fn, packed, leaf()])
    assert packs_itself(inside, [2])
    outside = heap_of([packed.grad_fn, packed, {}, leaf()])
    assert not packs_itself(outside, [3])
    after.backward()  # frees what is saved, and so ends the cycle
