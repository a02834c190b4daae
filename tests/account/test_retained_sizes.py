"""What an object alone keeps alive, and what else refers to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memtriage.account.retained_sizes import RetainedSizes
from memtriage.observe.heap_graph import HeapGraph
from support.heaps import heap_of

pytestmark = pytest.mark.usefixtures("only_new_objects")


class Kept:
    """A module's variables: two lists that share a tensor, and what is in them; by name."""

    def __init__(self) -> None:
        first, second, shared = (torch.ones(size) for size in (1, 2, 4))
        a: list[Any] = [first, shared, first]
        a.append(a)
        inner = [second]
        b = [shared, inner, shared]
        empty: list[Any] = []
        root: dict[str, Any] = {"a": a, "b": b, "empty": empty}
        inner.append(root)
        self.graph = heap_of([root, a, first], [root, a, shared], [root, b, inner, second], [root, empty])
        self.named = {
            "root": root, "a": a, "b": b, "inner": inner, "empty": empty, "first": first, "second": second,
            "shared": shared,
        }  # fmt: skip
        self.places = {name: self.graph.index[id(obj)] for name, obj in self.named.items()}
        self.names = {at: name for name, at in self.places.items()} | {-1: ""}


def test_what_dominates_and_what_refers() -> None:
    kept = Kept()
    sizes = RetainedSizes(kept.graph, kept.graph.tensors)
    assert {name: kept.names[sizes.dominator[at]] for name, at in kept.places.items()} == {
        "root": "", "a": "root", "b": "root", "inner": "b", "empty": "", "first": "a", "second": "inner",
        "shared": "root",
    }  # fmt: skip
    assert {name: [kept.names[each] for each in sizes.referrers[at]] for name, at in kept.places.items()} == {
        "root": ["inner"], "a": ["root"], "b": ["root"], "inner": ["b"], "empty": ["root"], "first": ["a"],
        "second": ["inner"], "shared": ["a", "b"],
    }  # fmt: skip
    assert sizes.elsewhere == frozenset()


@pytest.mark.parametrize(
    ("objects", "nbytes"),
    [
        (["a"], 1), (["b"], 2), (["inner"], 2), (["b", "inner"], 2), (["a", "b"], 3), (["root"], 7),
        (["shared"], 4), (["a", "shared"], 5), (["empty"], 0), ([], 0),
    ],
)  # fmt: skip
def test_bytes_go_with_what_alone_leads_to_them(objects: list[str], nbytes: int) -> None:
    kept = Kept()
    sizes = RetainedSizes(kept.graph, kept.graph.tensors)
    tensors = {kept.places[name]: size for name, size in (("first", 1), ("second", 2), ("shared", 4))}
    assert sizes.bytes_below([kept.places[name] for name in objects], tensors) == nbytes


def test_storages_that_do_not_count_lead_to_nothing() -> None:
    kept = Kept()
    sizes = RetainedSizes(kept.graph, [kept.places["second"]])
    assert {name for name, at in kept.places.items() if sizes.dominator[at] >= 0} == {"b", "inner", "second"}


def test_a_way_that_the_walk_took_counts_though_the_object_does_not_show_it() -> None:
    """A saved tensor is a new object each time it is read."""
    tensor = torch.ones(1)
    hiding: dict[str, Any] = {"": []}
    other = [tensor]
    graph = heap_of([hiding, tensor], [other])
    sizes = RetainedSizes(graph, graph.tensors)
    at = graph.index[id(tensor)]
    assert sizes.referrers[at] == [graph.index[id(hiding)], graph.index[id(other)]] == [0, 2]
    assert sizes.dominator[at] == -1


def held_outside(graph_of_all: bool) -> tuple[HeapGraph, list[Any]]:
    tensor, alone = torch.ones(1), torch.ones(1)
    graph = heap_of([{"kept": 1}, [tensor, alone], tensor])
    place = graph.objects[1]
    graph.index[id(alone)] = len(graph.objects)
    graph.objects.append(alone)
    graph.parents.append(1)
    graph.tensors.append(3)
    assert place[0] is tensor
    graph.all_libraries = graph_of_all
    return graph, [tensor]


@pytest.mark.parametrize("walked_all", [True, False])
@pytest.mark.parametrize("more", [0, 500])
def test_what_something_refers_to_that_was_not_walked_is_held_elsewhere_too(
    walked_all: bool, more: int
) -> None:
    graph, outside = held_outside(walked_all)
    others = [[each] for each in range(more)]
    last = [outside[0]]
    outside.clear()
    sizes = RetainedSizes(graph, graph.tensors)
    tensor, alone = 2, 3
    assert sizes.elsewhere == (frozenset() if walked_all else {tensor})
    assert sizes.dominator[tensor] == (1 if walked_all else -1)
    assert sizes.dominator[alone] == 1
    assert len(others) == more
    assert last[0] is graph.objects[tensor]


class Record:
    def __init__(self, kept: torch.Tensor) -> None:
        self.kept = [kept]


def test_a_namespace_that_is_made_after_the_walk_is_the_instance_itself() -> None:
    record = Record(torch.ones(1))
    graph = heap_of([{"record": record}, record, record.kept, record.kept[0]])
    graph.all_libraries = False
    assert vars(record)["kept"] is graph.objects[2]  # Python 3.11 and 3.12 make the dict now
    sizes = RetainedSizes(graph, graph.tensors)
    assert sizes.elsewhere == frozenset()
    assert [sizes.dominator[at] for at in (1, 2, 3)] == [0, 1, 2]
