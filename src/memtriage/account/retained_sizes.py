"""What an object alone keeps alive, and what else refers to it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from memtriage.account.dominators import dominated, immediate_dominators
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.objects import not_among
from memtriage.process.stdlib import gc

_AT_ONCE: Final = 128
"""Objects whose references are listed in one call: a list of some hundred stays in the processor's cache."""


class RetainedSizes:
    """References among all objects of a graph, and the dominators of those that can reach a storage.

    Computing them takes longer than the rest of a census.

    Args:
        storages: positions of the tensors that represent storages.

    Attributes:
        referrers: what refers to each object, in order.
        elsewhere: objects to which something refers that was not walked.
        reaching: the objects that lead to a storage, in order; `place` has the number of each.
        successors: for each of these, and for what holds the roots, the numbers of what it refers to.
    """

    def __init__(self, graph: HeapGraph, storages: Iterable[int]) -> None:
        # Before there are lists of referrers: these are many.
        others = [] if graph.all_libraries else graph.not_walked()
        self.referrers = _referrers(graph)
        self.reaching = reaching = _reaching(self.referrers, storages)
        self.elsewhere = _referred_to_elsewhere(graph, reaching, others)
        self._objects = len(graph.objects)
        self.place = place = {position: number for number, position in enumerate(reaching)}
        self.successors: list[list[int]] = [[] for _ in reaching]
        successors = self.successors
        for number, position in enumerate(reaching):
            for referrer in self.referrers[position]:
                successors[place[referrer]].append(number)
        roots = [
            number
            for number, position in enumerate(reaching)
            if graph.parents[position] < 0 or position in self.elsewhere
        ]
        successors.append(roots)

    @cached_property
    def dominator(self) -> list[int]:
        """The immediate dominator of each object; -1 for none."""
        dominators, reaching = [-1] * self._objects, self.reaching
        found = immediate_dominators(self.successors, len(self.successors) - 1)
        for number, position in enumerate(reaching):
            if 0 <= found[number] < len(reaching):
                dominators[position] = reaching[found[number]]
        return dominators

    def bytes_below(self, objects: Iterable[int], nbytes: Mapping[int, int]) -> int:
        """Return the bytes that are freed with some objects; `nbytes` has the sizes of those that count."""
        return sum(nbytes[position] for position in dominated(self.dominator, objects, nbytes))


def _referrers(graph: HeapGraph) -> list[list[int]]:
    index, referents = graph.index, graph.referents
    referrers: list[list[int]] = [[] for _ in graph.objects]
    for position in range(len(graph.objects)):
        for child in referents(position):
            at = index.get(id(child), -1)
            if at >= 0 and at != position:
                before = referrers[at]
                if not before or before[-1] != position:
                    before.append(position)
    for position, above in enumerate(graph.parents):
        if above >= 0 and above not in referrers[position]:
            insort(referrers[position], above)  # temporaries of the walk: saved tensors read twice
    return referrers


def _reaching(referrers: Sequence[Sequence[int]], storages: Iterable[int]) -> list[int]:
    """Return the objects that lead to storages, these included, in order."""
    relevant = bytearray(len(referrers))
    queue = list(storages)
    for position in queue:
        relevant[position] = 1
    for position in queue:
        for referrer in referrers[position]:
            if not relevant[referrer]:
                relevant[referrer] = 1
                queue.append(referrer)
    queue.sort()
    return queue


def _referred_to_elsewhere(graph: HeapGraph, positions: Sequence[int], others: list[Any]) -> frozenset[int]:
    """Return those objects to which one of `others` refers, which were not walked."""
    if not others:
        return frozenset()
    asked = {id(graph.objects[position]) for position in positions}
    others = list(not_among(others, _made_meanwhile(graph, positions)))
    met: set[int] = set()
    for start in range(0, len(others), _AT_ONCE):
        met |= asked.intersection(map(id, gc.get_referents(*others[start : start + _AT_ONCE])))
    return frozenset(graph.index[key] for key in met)


def _made_meanwhile(graph: HeapGraph, positions: Sequence[int]) -> frozenset[int]:
    """Return the ids of instances' namespaces that Python made after the walk, when something asked for one.

    Until then an instance refers to its attributes itself.
    """
    return frozenset(
        id(child)
        for position in positions
        for child in gc.get_referents(graph.objects[position])
        if type(child) is dict and id(child) not in graph.index
    )
