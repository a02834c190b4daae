"""The storages that are alive, and the Python objects that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from memtriage.account.owners import owners_in
from memtriage.account.ownership import RANK
from memtriage.account.paths import PathNamer
from memtriage.catalogue.catalogue import known_holders, owner_with
from memtriage.model.census import Owner
from memtriage.model.paths import ANY_ITEM, HolderPath, is_native
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import NODE, TENSOR
from memtriage.observe.tensors import StorageFacts, storage_facts


@dataclass(slots=True)
class HeldStorage:
    """A storage, and what a walk says of it.

    Attributes:
        position: of the tensor whose path names the storage, in the graph.
        known: the known holder that keeps it.
    """

    facts: StorageFacts
    position: int
    owner: Owner
    known: str | None = None


HeldStorages = dict[tuple[str, int], HeldStorage]
"""By device and address."""


def held_storages(graph: HeapGraph, namer: PathNamer) -> HeldStorages:
    """Return each storage that is alive once, however many tensors share it."""
    owners = owners_in(graph, namer)
    held: HeldStorages = {}
    for position in graph.tensors:
        facts = storage_facts(graph.objects[position])
        if facts is None:
            continue
        owner = owners.of(position)
        key = (facts.device, facts.address)
        known = held.get(key)
        if known is None:
            held[key] = HeldStorage(facts, position, owner)
            continue
        if RANK[owner] < RANK[known.owner]:
            known.owner = owner
        if is_native(namer.path(known.position).anchor):
            known.position = position  # the base of a view, say: what holds the view says more
    for key, holder in known_holders(graph).items():
        if key in held:
            held[key].known = holder.name
            held[key].owner = owner_with(holder, held[key].owner)
    return held


def anchors_of_nodes(graph: HeapGraph, namer: PathNamer) -> dict[int, HolderPath]:
    """Return each node's anchor. A node below another has the same one, so few paths are computed."""
    anchors: dict[int, HolderPath] = {}
    for position in graph.nodes:
        above = anchors.get(graph.parents[position])
        anchors[position] = namer.path(position).anchor if above is None else above
    return anchors


class HolderIndex:
    """Finds the object of the program that holds a storage, and remembers it for others on the same way.

    The graph must outlive it.
    """

    def __init__(self, graph: HeapGraph, namer: PathNamer) -> None:
        self._graph = graph
        self._namer = namer
        self._known: dict[int, tuple[int, int]] = {}

    def holder_of(self, position: int) -> tuple[int, int]:
        """Return the Python object that holds the chain, and the element of it that leads to `position`.

        The element is what the anchor path names; its parent is the container to clear or to detach in.
        """
        graph, namer, known = self._graph, self._namer, self._known
        outside = namer.path(position).outside
        climbed = []
        at = position
        while True:
            climbed.append(at)
            holder = known.get(at)
            if holder is not None and namer.path(at).outside == outside:
                break
            above = graph.parents[at]
            if above < 0:
                holder = at, at
                break
            path = namer.path(at)
            in_python = not path.in_graph and graph.kind(above) not in (NODE, TENSOR)
            if in_python and len(path.hops) <= outside:
                holder = above, at
                break
            at = above
        for at in climbed:
            if namer.path(at).outside == outside:
                known[at] = holder
        return holder

    def container_of(self, element: int) -> int:
        """Return the container whose entries vary in number: above an entry's own fields; else the holder."""
        graph, namer = self._graph, self._namer
        at, holder = element, graph.parents[element]
        while at >= 0:
            if namer.path(at).whole[-1:] == (ANY_ITEM,):
                return graph.parents[at]
            at = graph.parents[at]
        return max(0, holder)

    def holding_object(self, position: int, modules: dict[int, ModuleType]) -> Any:
        """Return the container that holds a storage's chain; for a namespace its instance or module."""
        graph = self._graph
        at, _ = self.holder_of(position)
        while self._namer.path(at).namespace:
            above = graph.parents[at]
            if above < 0:
                return modules.get(id(graph.objects[at]), graph.objects[at])
            at = above
        return graph.objects[at]
