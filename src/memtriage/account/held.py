"""The storages that are alive, and the Python objects that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from memtriage.account.holder_index import HolderIndex
from memtriage.account.naming import ObjectNamer
from memtriage.account.owners import owners_in
from memtriage.account.ownership import RANK, Owners
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
    facts = ((position, storage_facts(graph.objects[position])) for position in graph.tensors)
    held = by_storage(facts, owners_in(graph, namer), namer)
    for key, holder in known_holders(graph).items():
        if key in held:
            held[key].known = holder.name
            held[key].owner = owner_with(holder, held[key].owner)
    return held


def by_storage(
    facts: Iterable[tuple[int, StorageFacts | None]], owners: Owners, namer: ObjectNamer
) -> HeldStorages:
    """Join tensors, by position, that have one storage; it has the strongest of their owners."""
    held: HeldStorages = {}
    for position, found in facts:
        if found is None:
            continue
        owner = owners.of(position)
        known = held.setdefault((found.device, found.address), HeldStorage(found, position, owner))
        known.tensors.append(position)
        if RANK[owner] < RANK[known.owner]:
            known.owner, known.facts = owner, found
        if is_native(namer.path(known.position).anchor):
            known.position = position  # for example a view of this base: its holder says more
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
