"""Walk only those objects of libraries that lead to tensors, found by searching backward from the tensors.

Most of a heap is functions, classes and tables of libraries. A breadth-first walk from the same roots, only
through ancestors of what is sought, finds the same paths.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from types import ModuleType
from typing import Any, Final

import numpy as np

from memtriage.observe.classes import variables_of
from memtriage.observe.containers import base_of
from memtriage.observe.kinds import (
    ATOM,
    BOUNDARY,
    FUTURE,
    KLASS,
    NODE,
    PLACEHOLDER,
    SAVED,
    TENSOR,
)
from memtriage.observe.loaded_modules import own_modules
from memtriage.observe.objects import not_among
from memtriage.observe.walker import HeapWalker
from memtriage.process.stdlib import gc

NamedModules = Sequence[tuple[str, ModuleType]]
WantedContainers = Callable[[Iterable[Any]], Sequence[Any]]
"""Takes the growable containers that the program's variables do not reach, and returns the wanted ones."""

_SOUGHT: Final = frozenset((TENSOR, NODE, FUTURE, SAVED, PLACEHOLDER))
"""Kinds of objects that hold memory of tensors: all of them in libraries are found."""
_FEW: Final = 64
"""Objects whose referrers the collector is asked for: they take twice the time of one, 50 ms with 200,000
objects in the heap."""
_ASKED: Final = 8.0
"""How often it is asked for one. To list all references takes as long as 5 to 13 such questions."""
_AT_ONCE: Final = 4096
"""Objects whose references are listed in one call; the lists of all would take some hundred MB."""


def enter_holders_of_tensors(
    walker: HeapWalker, libraries: NamedModules, wanted_containers: WantedContainers
) -> None:
    """Enter the objects of libraries that lead to tensors and wanted containers, and what these lead to.

    Then the same for memtriage's own modules. What no root reaches is left in `walker.everything`.

    Args:
        walker: has walked the program's own variables.
        libraries: their modules, with names.
        wanted_containers: called once.
    """
    graph = walker.graph
    referrers = _Referrers(walker, libraries)
    sought = _that_hold_tensors(walker)
    # No variable for the growable containers: it would look like another holder of the wanted ones.
    groups = walker.everything.by_type.values()
    growable = chain.from_iterable(group for group in groups if base_of(type(group[0])) is not None)
    sought += wanted_containers(not_among(list(growable), graph.index))
    holders = referrers.ancestors(sought)
    del referrers
    graph.all_libraries = False
    _enter_modules(walker, libraries, holders)
    _walk_within(walker, holders)
    _enter_classes(walker, holders)
    _walk_within(walker, holders)
    _walk_below(walker, sought)
    graph.first_own = len(graph.objects)
    _enter_modules(walker, own_modules(), holders)
    _walk_within(walker, holders)
    _walk_below(walker, sought)
    unreached = {key for key in holders if key not in graph.index}
    left = list(walker.everything.among(unreached)) if unreached else []
    walker.everything.clear()
    walker.everything.objects += left


def _that_hold_tensors(walker: HeapWalker) -> list[Any]:
    """Return the objects that have memory of tensors and were not reached."""
    index, kinds = walker.graph.index, walker.kinds
    groups = walker.everything.by_type.values()
    sought = (group for group in groups if kinds[type(group[0])] in _SOUGHT)
    return list(not_among(list(chain.from_iterable(sought)), index))


class _Referrers:
    """What refers to what among the objects that were not reached and the roots of libraries.

    The collector is asked for the referrers of a few objects. It compares each reference of the heap with
    each object that is asked for, so that for more, or for longer ways to them, all references are listed.

    Args:
        walker: has what was reached.
        libraries: whose modules are roots, as are classes.
    """

    def __init__(self, walker: HeapWalker, libraries: NamedModules) -> None:
        self._walker, self._index, self._kinds = walker, walker.graph.index, walker.kinds
        spaces = [variables_of(module) for _, module in [*libraries, *own_modules()]]
        groups = walker.everything.by_type.values()
        classes = chain.from_iterable(group for group in groups if self._kinds[type(group[0])] == KLASS)
        self._roots = {id(root): root for root in chain(spaces, classes) if self._index.get(id(root), -1) < 0}
        self._asked = 0.0
        self._objects: list[Any] = []

    def ancestors(self, sought: Sequence[Any]) -> dict[int, Any]:
        """Return all objects through which roots lead to the sought objects, including these, by id."""
        ancestors = {id(obj): obj for obj in sought}
        waiting = list(sought)
        own = {id(part) for part in (sought, ancestors, waiting, self._roots, self._objects)}
        while waiting:
            self._asked += 1 + len(waiting) / _FEW
            # Pass this tuple on as it is: from CPython 3.13 on, the call itself only leaves out its own copy.
            targets = tuple(waiting)
            listed = self._objects or len(targets) > _FEW or self._asked > _ASKED
            referrers = self._listed(targets) if listed else gc.get_referrers(*targets)
            waiting.clear()
            for referrer in referrers:
                key = id(referrer)
                if key in ancestors or key in own or referrer is targets:
                    continue
                if key in self._roots:
                    ancestors[key] = referrer
                elif key not in self._index and self._kinds[type(referrer)] not in (ATOM, BOUNDARY):
                    ancestors[key] = referrer
                    waiting.append(referrer)
            del referrers, targets
        return ancestors

    def _listed(self, sought: Sequence[Any]) -> list[Any]:
        """Return what refers to these objects, from a list of all references (24 bytes and 0.15 us each)."""
        if not self._objects:
            self._list()
        ids = np.array([id(obj) for obj in sought], np.uint64)
        first, last = (np.searchsorted(self._children, ids, side) for side in ("left", "right"))
        found = [self._parents[start:end] for start, end in zip(first, last, strict=True) if start < end]
        return [self._objects[parent] for parent in np.unique(np.concatenate(found))] if found else []

    def _list(self) -> None:
        unreached = list(not_among(self._walker.everything.objects, self._index))
        self._objects += self._roots.values()
        self._objects += not_among(unreached, self._roots)
        counts, children = array("q"), array("Q")
        for start in range(0, len(self._objects), _AT_ONCE):
            referents = list(map(gc.get_referents, self._objects[start : start + _AT_ONCE]))
            counts.extend(map(len, referents))
            children.extend(map(id, chain.from_iterable(referents)))
        unordered = np.frombuffer(children, np.uint64)
        order = np.argsort(unordered)
        self._children = unordered[order]
        parents = np.repeat(np.arange(len(self._objects)), np.frombuffer(counts, np.int64))
        self._parents = parents[order]


def _enter_modules(walker: HeapWalker, named: NamedModules, wanted: Container[int]) -> None:
    for name, module in named:
        if id(variables_of(module)) in wanted:
            walker.enter_module(name, module)


def _enter_classes(walker: HeapWalker, holders: dict[int, Any]) -> None:
    for obj in holders.values():
        if walker.kinds[type(obj)] == KLASS and walker.graph.index.get(id(obj), -1) < 0:
            walker.enter_class(obj)


def _walk_within(walker: HeapWalker, wanted: Container[int]) -> None:
    """Continue the walk, but only enter wanted objects, and no classes, which are roots."""
    graph = walker.graph
    while walker.head < len(graph.objects):
        obj, position = graph.objects[walker.head], walker.head
        walker.head += 1
        for child in walker.children(obj, walker.kinds[type(obj)], position):
            if id(child) not in wanted or id(child) in graph.index:
                continue
            if walker.kinds[type(child)] != KLASS:
                walker.enter(child, position)


def _walk_below(walker: HeapWalker, sought: Sequence[Any]) -> None:
    """Walk everything that the sought objects found so far lead to."""
    graph = walker.graph
    for obj in sought:
        position = graph.index.get(id(obj), -1)
        if position >= 0:
            walker.enter_children(graph.referents(position), position)
    walker.exhaust()
    walker.release()
