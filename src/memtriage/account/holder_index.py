"""Which object of a walked heap holds a storage, in this process or in another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memtriage.account.naming import ObjectNamer, WalkedGraph
from memtriage.model.paths import ANY_ITEM, is_entry
from memtriage.observe.kinds import NODE, TENSOR


class HolderIndex:
    """Finds the object of the program that holds a storage, and remembers it for others on the same path.

    The graph must outlive it.
    """

    def __init__(self, graph: WalkedGraph, namer: ObjectNamer) -> None:
        self._graph = graph
        self._namer = namer
        self._known: dict[int, tuple[int, int]] = {}

    def holder_of(self, position: int) -> tuple[int, int]:
        """Return the Python object that holds the path to `position`, and its element on that path.

        The anchor path names the element; its parent is the container to clear, or where to detach.
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
        """Return the container whose number of entries varies: above an entry's fields; else the holder."""
        above = self._graph.parents[element]
        return next(self._with_entries(element), element if above < 0 else above)

    def outermost_of(self, position: int) -> int | None:
        """Return the outermost container whose entries (`[*]`) are on the path to a position."""
        containers = list(self._with_entries(position))
        return containers[-1] if containers else None

    def _with_entries(self, position: int) -> Iterator[int]:
        """Yield the containers whose entries (`[*]`) are on the path to a position, innermost first."""
        graph, namer, at = self._graph, self._namer, position
        while (above := graph.parents[at]) >= 0:
            path = namer.path(at)
            if path.whole[-1:] == (ANY_ITEM,) and not path.namespace:  # the entry, not the dict of its fields
                yield above
            at = above

    def containers(self, elements: Iterable[int]) -> list[int]:
        """Return how many containers have the entries on the paths to some elements, innermost first.

        Args:
            elements: positions, whose paths have the same folded names.
        """
        graph, namer = self._graph, self._namer
        found: list[set[int]] = []
        for element in elements:
            at, level = element, 0
            while (above := graph.parents[at]) >= 0:
                path = namer.path(at)
                if path.whole and is_entry(path.whole[-1]) and not path.namespace:
                    if level == len(found):
                        found.append(set())
                    if above in found[level]:
                        break
                    found[level].add(above)
                    level += 1
                at = above
        return [len(each) for each in found]

    def instance_of(self, holder: int) -> int:
        """Return what a holder belongs to; for a namespace its instance, function or module."""
        at = holder
        while self._namer.path(at).namespace and self._graph.parents[at] >= 0:
            at = self._graph.parents[at]
        return at
