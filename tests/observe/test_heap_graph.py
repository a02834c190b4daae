"""What a walk has reached, how it was walked, and what it has not reached."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest
import torch

from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import PLAIN, TENSOR


def test_kinds_and_edges_of_what_was_reached() -> None:
    held, leaf = [[1], "text"], torch.ones(4, requires_grad=True)
    made = leaf * 2
    graph = HeapGraph()
    graph.objects = [held, made]
    for each in graph.objects:
        graph.kinds.classify(each)
    assert [graph.kind(0), graph.kind(1)] == [PLAIN, TENSOR]
    assert list(map(id, graph.referents(0))) == list(map(id, gc.get_referents(held)))
    assert any(each is made.grad_fn for each in graph.referents(1))  # which the collector does not see


def test_a_graph_is_empty_until_a_walk_and_after_it() -> None:
    graph = HeapGraph()
    assert (graph.cut, graph.all_libraries) == (None, True)
    assert graph.first_own == graph.first_unrooted == graph.first_garbage == 0
    kept = [graph.objects, graph.parents, graph.index, graph.root_names, graph.not_searched]
    kept += [graph.tensors, graph.nodes, graph.modules, graph.optimizers, graph.arrays]
    for each in kept:
        each.update({1: 1}) if isinstance(each, dict) else each.add(1) if isinstance(
            each, set
        ) else each.append(1)
    graph.kinds.classify([])
    reader = graph.reader
    graph.drop()
    assert not any(kept) and graph.kinds.known == {}
    assert graph.reader is not reader  # which keeps types of nodes


def test_what_was_not_walked_is_the_rest_of_what_the_collector_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, fenced = ModuleType("passing"), [[1]]
    vars(module)["held"] = fenced
    monkeypatch.setitem(sys.modules, "passing", module)
    reached, missed = [[1]], [[2]]
    graph = HeapGraph()
    graph.index = {id(reached): 0, id(fenced): -1, id(vars(module)): -1}
    found = {id(each) for each in graph.not_walked()}
    assert {id(missed), id(vars(module))} <= found
    assert not {id(reached), id(fenced)} & found
