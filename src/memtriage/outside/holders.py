"""What holds a storage of another process in Python: by the rules of the census inside."""

from __future__ import annotations

from dataclasses import dataclass

from memtriage.model.paths import ANY_ITEM
from memtriage.observe.kinds import NODE, TENSOR
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
        self._namer = namer
        self._known: dict[int, RemoteHolding] = {}

    def of(self, position: int) -> RemoteHolding:
        """Return what holds the chain that leads to the object at a position."""
        graph, namer = self._graph, self._namer
        outside = namer.path(position).outside
        climbed = []
        at = position
        while True:
            known = self._known.get(at)
            if known is not None and namer.path(at).outside == outside:
                break
            climbed.append(at)
            above = graph.parents[at]
            if above < 0:
                known = self._holding(at, at)
                break
            path = namer.path(at)
            in_python = not path.in_graph and graph.kinds[above] not in (NODE, TENSOR)
            if in_python and len(path.hops) <= outside:
                known = self._holding(above, at)
                break
            at = above
        for at in climbed:
            if namer.path(at).outside == outside:
                self._known[at] = known
        return known

    def _holding(self, holder: int, element: int) -> RemoteHolding:
        graph = self._graph
        at = holder
        while self._namer.path(at).namespace and graph.parents[at] >= 0:
            at = graph.parents[at]
        container = self._container_of(element)
        klass = graph.type_at(container)
        bound = None if klass is None else graph.heap.bound(graph.objects[container], klass)
        kind = graph.type_at(holder)
        return RemoteHolding(
            graph.objects[at], graph.objects[element], None if kind is None else kind.name, bound
        )

    def _container_of(self, element: int) -> int:
        """Return the container whose entries vary in number, or what holds the element."""
        at = element
        while at >= 0:
            above = self._graph.parents[at]
            if self._namer.path(at).whole[-1:] == (ANY_ITEM,) and above >= 0:
                return above
            at = above
        return max(0, self._graph.parents[element])
