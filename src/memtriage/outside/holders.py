"""What holds a storage of another process in Python: by the rules of the census inside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memtriage.account.holder_index import HolderIndex
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.naming import RemoteNamer


@dataclass(frozen=True, slots=True)
class RemoteHolding:
    """What keeps a storage's chain.

    Attributes:
        holder: address of the container, instance, module or function.
        element: address of the object in it that its path names.
        kind: type of the container; None for a function's variables.
        bound: entries at which the container stops growing; None for no bound.
    """

    holder: int
    element: int
    kind: str | None
    bound: int | None


class Holders:
    """Finds holders in one graph."""

    def __init__(self, graph: RemoteGraph, namer: RemoteNamer) -> None:
        self._graph = graph
        self._index = HolderIndex(graph, namer)

    def containers(self, positions: Iterable[int]) -> list[int]:
        """Return how many containers have the entries on the paths to objects with one anchor."""
        return self._index.containers({self._index.holder_of(position)[1] for position in positions})

    def of(self, position: int) -> RemoteHolding:
        """Return what holds the chain that leads to the object at a position."""
        graph, index = self._graph, self._index
        holder, element = index.holder_of(position)
        container = index.container_of(element)
        klass, kind = graph.type_at(container), graph.type_at(holder)
        return RemoteHolding(
            holder=graph.objects[index.instance_of(holder)],
            element=graph.objects[element],
            kind=None if kind is None else kind.name,
            bound=None if klass is None else graph.heap.bound(graph.objects[container], klass),
        )
