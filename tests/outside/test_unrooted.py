"""Objects of another process that no root leads to: held by something else, or only by each other."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memtriage.observe.kinds import NODE, PLAIN, TENSOR
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.own_memory import own_words
from memtriage.outside.unrooted import Unrooted
from support.outside_parts import known_python, walker_now

pytestmark = known_python


class Thing:
    """Something that refers to something."""

    def __init__(self, value: object = None) -> None:
        self.value = value


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def entered(tracked: list[int], before: Callable[[Any], None] = lambda walker: None) -> RemoteGraph:
    walker = walker_now()
    before(walker)
    addresses = np.array(tracked, np.int64)
    rows = walker.rows.rows(walker.graph.heap.memory.data[walker.graph.heap.memory.places(addresses) + 1])
    Unrooted(walker).enter(addresses, rows)
    return walker.graph


def roots(graph: RemoteGraph) -> list[int]:
    return [obj for obj, parent in zip(graph.objects, graph.parents, strict=True) if parent < 0]


def leaf() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def node_of(tensor: torch.Tensor) -> int:
    return own_words(id(tensor.grad_fn), 3)[2]


def test_containers_come_first_then_leaves_with_gradients_then_nodes_then_tensors() -> None:
    plain, trained, product = torch.ones(4), leaf(), leaf() * 2
    trained.grad = torch.ones(4)
    things: list[Any] = [plain, product, product.grad_fn, trained, Thing(torch.ones(4))]
    graph = entered([id(each) for each in things])
    assert roots(graph) == [id(things[4]), trained._cdata, node_of(product), plain._cdata, product._cdata]
    assert graph.first_unrooted == 0
    assert graph.first_garbage == len(graph.objects)
    at = [graph.kinds[graph.objects.index(each)] for each in roots(graph)]
    assert at == [PLAIN, TENSOR, NODE, TENSOR, TENSOR]
    assert graph.parents[graph.objects.index(things[4].value._cdata)] >= 0


def cycle() -> list[int]:
    """Addresses of two lists that hold each other, and nothing else does."""
    one: list[Any] = [[]]
    one[0].append(one)
    return [id(one), id(one[0])]


def test_what_only_holds_itself_is_garbage() -> None:
    held = [1, Thing()]
    tracked = [*cycle(), id(held)]
    graph = entered(tracked)
    assert roots(graph) == [id(held), tracked[0]]
    assert graph.first_garbage == graph.objects.index(tracked[0])
    assert graph.parents[graph.objects.index(tracked[1])] == graph.objects.index(tracked[0])


def test_a_cycle_with_one_more_reference_is_held() -> None:
    one: list[Any] = []
    one.append([one])
    tracked = [id(one[0]), id(one)]
    graph = entered(tracked)
    assert roots(graph) == [id(one)]
    assert graph.objects[: graph.first_garbage] == [id(one), id(one[0])]


def test_the_gradient_of_garbage_goes_with_its_tensor() -> None:
    def made() -> tuple[list[int], int, int]:
        trained, one = leaf(), Thing()
        trained.grad = torch.ones(4)
        one.value = [one, trained]
        gradient = trained.grad
        return (
            [id(gradient), id(one), id(one.value), id(vars(one)), id(trained)],
            trained._cdata,
            gradient._cdata,
        )

    tracked, tensor, gradient = made()
    graph = entered(tracked)
    assert graph.first_garbage == 0
    assert roots(graph) == [tracked[1]]
    holder = graph.parents[graph.objects.index(gradient)]
    assert graph.objects[holder] == tensor


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_is_held_by_cpp() -> None:
    weight = leaf()
    (weight**3).sum().backward(create_graph=True)
    gradient = weight.grad
    assert gradient is not None
    graph = entered([id(gradient), id(weight)])
    assert roots(graph)[0] == weight._cdata
    assert graph.objects[graph.parents[graph.objects.index(gradient._cdata)]] == weight._cdata
    weight.grad = None


def test_what_is_in_the_graph_or_is_never_entered_is_left_out() -> None:
    known, tensor, product = Thing([1]), torch.ones(4), leaf() * 2
    others: list[Any] = [known, tensor, product.grad_fn, sys, Thing, walker_now(), known.value]

    def enter_known(walker: Any) -> None:
        walker.root(id(known), PLAIN, "known")
        walker.root(tensor._cdata, TENSOR, "tensor")
        walker.root(node_of(product), NODE, "node")
        walker.exhaust()

    graph = entered([id(each) for each in others], enter_known)
    assert len(roots(graph)) == 3
    assert graph.first_unrooted == graph.first_garbage == len(graph.objects)


def test_what_leads_nowhere_is_entered_without_a_walk() -> None:
    empty, full, numbers = [], [torch.ones(4)], [1, "one", Thing]
    graph = entered([id(empty), id(full), id(numbers)])
    assert graph.objects == [id(empty), id(full), full[0]._cdata, id(numbers)]
    assert graph.tensors == [2]


def test_of_a_walk_that_was_cut_only_the_tensors_are_entered() -> None:
    tensor, thing, product = torch.ones(4), Thing(torch.ones(4)), leaf() * 2

    def cut(walker: Any) -> None:
        walker.graph.cut = "the time was over"

    graph = entered([id(thing), id(tensor), id(product.grad_fn), id(thing.value)], cut)
    assert graph.objects == roots(graph) == [tensor._cdata, thing.value._cdata]
    assert graph.tensors == [0, 1]
    assert graph.not_searched == {0, 1}
    assert graph.first_unrooted == graph.first_garbage == 2


def test_nothing_that_is_followed_leaves_nothing() -> None:
    graph = entered([])
    assert (graph.objects, graph.first_unrooted, graph.first_garbage) == ([], 0, 0)
