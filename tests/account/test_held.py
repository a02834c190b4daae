"""The storages that are alive, and what a walk says of each."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import nn

import memtriage
from memtriage.account.held import HeldStorage, anchors_of_nodes, held_storages, holding_object
from memtriage.account.holder_index import HolderIndex
from memtriage.account.paths import PathNamer
from memtriage.model.paths import in_words
from memtriage.observe.heap_graph import HeapGraph
from support.heaps import heap_of
from support.torch_state import shows_saved_tensors


def held_in(graph: HeapGraph) -> dict[int, HeldStorage]:
    """What is known of each storage, by its address."""
    held = held_storages(graph, PathNamer(graph))
    assert all(key == (each.facts.device, each.facts.address) for key, each in held.items())
    return {address: each for (_, address), each in held.items()}


def told(held: HeldStorage) -> tuple[int, str, int, str | None]:
    return held.facts.nbytes, held.owner, held.position, held.known


def test_each_storage_is_told_once_with_the_owner_that_says_most() -> None:
    model = nn.Linear(4, 2)
    weight, bias = model.weight, model.bias
    detached, view, plain = weight.detach(), bias.view(1, 2), torch.ones(5)
    nothing, pretended = torch.ones(0), torch.ones(9, device="meta")
    variables = [plain, detached, nothing, pretended, weight, bias, view]
    graph = heap_of(
        *([variables, each] for each in variables[:4]),
        *([variables, model, model.__dict__, model._parameters, each] for each in (weight, bias)),
        [variables, view],
    )
    held = held_in(graph)
    at = graph.index
    assert {address: told(each) for address, each in held.items()} == {
        plain.data_ptr(): (20, "variable", at[id(plain)], None),
        weight.data_ptr(): (32, "parameter", at[id(detached)], None),
        bias.data_ptr(): (8, "parameter", at[id(bias)], None),
    }


def test_of_what_only_c_holds_another_tensor_of_the_storage_says_more() -> None:
    base, other = torch.ones(6), torch.ones(7)
    view, lost = base[:3], other[:2]
    graph = heap_of([[], view], native=[[base], [lost], [other]])
    assert told(held_in(graph)[base.data_ptr()])[2] == graph.index[id(view)]
    backwards = heap_of([{}], native=[[base], [lost], [other], [(), view]])
    held = held_in(backwards)
    assert told(held[base.data_ptr()])[2] == backwards.index[id(view)]
    assert told(held[other.data_ptr()])[2] == backwards.index[id(other)]


def test_a_known_holder_is_named_and_gives_its_owner() -> None:
    table, scale, other = torch.ones(10), nn.Linear(1, 3), torch.ones(4)
    kept = {"table": table, "weight": scale.weight, "gone": torch.ones(8)}
    graph = heap_of(
        [kept, table], [[], other], [scale, scale.__dict__, scale._parameters, scale.weight], root="train"
    )
    registration = memtriage.register_holder("rope tables", lambda: kept)
    try:
        held = held_in(graph)
    finally:
        registration.remove()
    assert {each.facts.nbytes: (each.known, each.owner) for each in held.values()} == {
        40: ("rope tables", "known cache"),
        12: ("rope tables", "parameter"),
        16: (None, "variable"),
    }


@shows_saved_tensors()
def test_a_node_below_another_has_its_anchor() -> None:
    loss, other = (torch.ones(2, requires_grad=True).exp().sin() for _ in range(2))
    last, alone = loss.grad_fn, other.grad_fn
    assert last is not None
    before = last.next_functions[0][0]
    losses, root = [loss], {"losses": [], "other": other}
    root["losses"] = losses
    graph = heap_of([root, losses, loss, last, before], [root, other, alone])
    anchors = anchors_of_nodes(graph, PathNamer(graph))
    assert {at: in_words(anchor) for at, anchor in anchors.items()} == {
        graph.index[id(last)]: "train.losses[*]",
        graph.index[id(before)]: "train.losses[*]",
        graph.index[id(alone)]: "train.other",
    }


class Record:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_a_storage_is_held_by_the_container_or_by_what_has_the_namespace() -> None:
    listed, kept, variable = torch.ones(1), torch.ones(2), torch.ones(3)
    record, items = Record(kept), [listed]
    module = types.ModuleType("train")
    module.__dict__.update(items=items, record=record, variable=variable)
    namespace = module.__dict__
    graph = heap_of(
        [namespace, items, listed], [namespace, record, record.__dict__, kept], [namespace, variable]
    )
    namer = PathNamer(graph)
    holders = HolderIndex(graph, namer)

    def holding(obj: Any, modules: dict[int, types.ModuleType]) -> Any:
        return holding_object(graph, namer, holders, graph.index[id(obj)], modules)

    modules = {id(namespace): module, id(items): sys}
    assert holding(listed, modules) is items
    assert holding(kept, modules) is record
    assert holding(variable, modules) is module
    assert holding(variable, {}) is namespace
