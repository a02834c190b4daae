"""Objects that no root reaches: held by something that the walk does not see, or only by each other."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.objects import Listing
from memtriage.observe.unrooted import enter_unrooted
from memtriage.observe.walker import HeapWalker


class Thing:
    def __init__(self, value: object = None) -> None:
        self.value = value


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leaf() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def entered(make: Callable[[], list[Any]], before: Callable[[HeapWalker], None] | None = None) -> HeapGraph:
    """The graph after what a function returns was entered, which nothing else holds."""
    walker = HeapWalker(HeapGraph())
    if before is not None:
        before(walker)
    walker.everything = Listing(make())
    enter_unrooted(walker)
    return walker.graph


def roots(graph: HeapGraph) -> list[Any]:
    return [obj for obj, parent in zip(graph.objects, graph.parents, strict=True) if parent < 0]


def test_containers_come_first_then_leaves_with_gradients_then_nodes_then_tensors() -> None:
    plain, trained, product = torch.ones(4), leaf(), leaf() * 2
    trained.grad = torch.ones(4)
    node, thing = product.grad_fn, Thing(torch.ones(4))
    graph = entered(lambda: [plain, product, node, trained, thing, 1, gc, Thing])
    found = roots(graph)
    assert len(found) == 5
    assert all(one is other for one, other in zip(found, [thing, trained, node, plain, product], strict=True))
    assert graph.first_unrooted == 0
    assert graph.first_garbage == len(graph.objects)
    assert set(graph.root_names.values()) == {""}
    assert graph.parents[graph.index[id(thing.value)]] >= 0


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_is_reached_through_its_leaf() -> None:
    weight = leaf()
    (weight**3).sum().backward(create_graph=True)
    graph = entered(lambda: [weight.grad, weight])
    assert roots(graph)[0] is weight
    assert graph.objects[graph.parents[graph.index[id(weight.grad)]]] is weight
    weight.grad = None


def test_what_the_walk_has_reached_is_left_out() -> None:
    known = Thing([1])

    def enter_known(walker: HeapWalker) -> None:
        walker.root(known, "known")
        walker.exhaust()

    graph = entered(lambda: [known, known.value], enter_known)
    assert roots(graph) == [known]
    assert graph.first_unrooted == graph.first_garbage == len(graph.objects) == 2


def test_the_listing_is_released() -> None:
    walker = HeapWalker(HeapGraph())
    enter_unrooted(walker)
    assert walker.everything.objects == []
