"""Which object of the program holds a storage."""

from __future__ import annotations

from typing import Any

import torch

from memtriage.account.holder_index import HolderIndex
from memtriage.account.paths import PathNamer
from memtriage.model.paths import in_words
from memtriage.observe.heap_graph import HeapGraph
from support.heaps import heap_of
from support.torch_state import shows_saved_tensors


class Record:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def found(graph: HeapGraph, *objects: Any) -> list[tuple[Any, Any]]:
    """What holds each object, and the element of it that leads there."""
    index = HolderIndex(graph, PathNamer(graph))
    pairs = [index.holder_of(graph.index[id(obj)]) for obj in objects]
    assert pairs == [index.holder_of(graph.index[id(obj)]) for obj in objects]
    return [(graph.objects[holder], graph.objects[element]) for holder, element in pairs]


def same(pairs: list[tuple[Any, Any]], expected: list[tuple[Any, Any]]) -> bool:
    return [tuple(map(id, pair)) for pair in pairs] == [tuple(map(id, pair)) for pair in expected]


def test_a_tensor_in_containers_is_held_by_the_innermost() -> None:
    tensor, variable = torch.ones(1), torch.ones(1)
    inner = [tensor]
    outer = {"inner": inner}
    root = {"outer": outer, "variable": variable}
    graph = heap_of([root, outer, inner, tensor], [root, variable])
    assert same(found(graph, tensor, variable, root), [(inner, tensor), (root, variable), (root, root)])


def test_the_containers_on_the_way_are_counted_innermost_first() -> None:
    """Three saves of two states each: one list of saves, three of states, six states."""
    saves = [{"states": [{"mean": torch.ones(1)} for _ in range(2)]} for _ in range(3)]
    root = {"saves": saves}
    chains = [
        [root, saves, save, save["states"], state, state["mean"]]
        for save in saves
        for state in save["states"]
    ]
    graph = heap_of(*chains)
    index = HolderIndex(graph, PathNamer(graph))
    assert index.containers(graph.index[id(chain[-1])] for chain in chains) == [3, 1]


@shows_saved_tensors()
def test_what_a_graph_saved_is_held_by_what_holds_the_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    one, two = x.exp(), x.exp().sin()
    node, deep = one.grad_fn, two.grad_fn
    assert node is not None and deep is not None
    before = deep.next_functions[0][0]
    saved, deeper = node._saved_result, before._saved_result
    losses, keep = [one, two], Record(two)
    root = {"losses": losses, "keep": keep}
    graph = heap_of(
        [root, losses, one, node, saved], [root, losses, two, deep, before, deeper], [root, keep, [two]]
    )
    assert same(
        found(graph, saved, deeper, two, deep),
        [(losses, one), (losses, two), (losses, two), (losses, two)],
    )


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = [torch.ones(5)]
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_what_an_autograd_context_keeps_is_held_by_what_holds_the_graph() -> None:
    loss = Keeping.apply(torch.ones(3, requires_grad=True))
    node, losses = loss.grad_fn, [loss]
    graph = heap_of([{"losses": losses}, losses, loss, node, node.__dict__, node.kept, node.kept[0]])
    assert same(found(graph, node.kept[0], node.kept), [(losses, loss), (losses, loss)])


def test_a_gradient_is_held_by_what_holds_its_tensor() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    root, weights = {"weights": []}, [weight]
    root["weights"] = weights
    graph = heap_of([root, weights, weight, weight.grad])
    assert same(found(graph, weight.grad, weight), [(weights, weight), (weights, weight)])


def test_what_only_c_holds_is_its_own_holder() -> None:
    tensor, result = torch.ones(1), torch.ones(1, requires_grad=True).exp()
    graph = heap_of([{}], native=[[tensor], [result, result.grad_fn]])
    assert same(found(graph, tensor, result.grad_fn), [(tensor, tensor), (result, result)])


def test_the_container_of_an_entry_is_the_one_whose_entries_vary() -> None:
    tensor, pair, plain, part = torch.ones(1), (torch.ones(1), 1), torch.ones(1), torch.ones(1)
    record, slotted, model = Record(tensor), Slotted(torch.ones(1)), torch.nn.Linear(1, 1)
    records, pairs, slots, models, lists = [record, Record(2)], [pair], [slotted], [model], [[part]]
    root = {
        "records": records, "pairs": pairs, "plain": plain, "slots": slots, "models": models, "lists": lists,
    }  # fmt: skip
    graph = heap_of(
        [root, records, record, record.__dict__, tensor],
        [root, pairs, pair, pair[0]],
        [root, plain],
        [root, slots, slotted, slotted.value],
        [root, models, model, model.__dict__, model._parameters, model.weight],
        [root, lists, lists[0], part],
    )
    namer = PathNamer(graph)
    index = HolderIndex(graph, namer)
    containers = {}
    for obj in (tensor, pair[0], plain, slotted.value, model.weight, part, records, root):
        at = graph.index[id(obj)]
        containers[in_words(namer.path(at).whole)] = graph.objects[index.container_of(at)]
    expected: dict[str, Any] = {
        "train.records[*].value": records,
        "train.pairs[*][0]": pairs,
        "train.plain": root,
        "train.slots[*].value": slots,
        "train.models[*].weight": models,
        "train.lists[*][*]": lists[0],
        "train.records": root,
        "train": root,
    }
    assert list(containers) == list(expected)
    assert all(containers[name] is container for name, container in expected.items())
    lost = heap_of([root], native=[[tensor]])
    assert HolderIndex(lost, PathNamer(lost)).container_of(1) == 1


def test_a_namespace_belongs_to_its_instance() -> None:
    tensor = torch.ones(1)
    record = Record(tensor)
    root = {"record": record}
    graph = heap_of([root, record, record.__dict__, tensor])
    index = HolderIndex(graph, PathNamer(graph))
    assert [index.instance_of(at) for at in range(4)] == [0, 1, 1, 3]
    lost = heap_of(native=[[record, record.__dict__, tensor]])
    assert [HolderIndex(lost, PathNamer(lost)).instance_of(at) for at in range(3)] == [0, 0, 2]
