"""The storages that are alive, and the Python objects that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from memtriage.account.holder_index import HolderIndex
from memtriage.account.owners import owners_in
from memtriage.account.ownership import RANK
from memtriage.account.paths import PathNamer
from memtriage.catalogue.catalogue import known_holders, owner_with
from memtriage.model.census import Owner
from memtriage.model.paths import HolderPath, is_native
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.tensors import StorageFacts, storage_facts


@dataclass(slots=True)
class HeldStorage:
    """A storage, and what a walk says about it.

    Attributes:
        position: of the tensor whose path names the storage, in the graph.
        known: the known holder that keeps it.
        tensors: positions of all tensors that have it.
    """

    facts: StorageFacts
    position: int
    owner: Owner
    known: str | None = None
    tensors: list[int] = field(default_factory=list)


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
            held[key] = HeldStorage(facts, position, owner, tensors=[position])
            continue
        known.tensors.append(position)
        if RANK[owner] < RANK[known.owner]:
            known.owner = owner
        if is_native(namer.path(known.position).anchor):
            known.position = position  # for example a view of this base: its holder says more
    for key, holder in known_holders(graph).items():
        if key in held:
            held[key].known = holder.name
            held[key].owner = owner_with(holder, held[key].owner)
    return held


def anchors_of_nodes(graph: HeapGraph, namer: PathNamer) -> dict[int, HolderPath]:
    """Return each node's anchor. Nodes below a node have the same anchor, so few paths are computed."""
    anchors: dict[int, HolderPath] = {}
    for position in graph.nodes:
        above = anchors.get(graph.parents[position])
        anchors[position] = namer.path(position).anchor if above is None else above
    return anchors


def holding_object(
    graph: HeapGraph, namer: PathNamer, holders: HolderIndex, position: int, modules: dict[int, ModuleType]
) -> Any:
    """Return the container that holds the path to a storage; for a namespace its instance or module."""
    at = holders.instance_of(holders.holder_of(position)[0])
    obj = graph.objects[at]
    return modules.get(id(obj), obj) if namer.path(at).namespace else obj
