"""Walk only those objects of libraries that lead to tensors, found by searching backward from the tensors.

Most of a heap is functions, classes and tables of libraries. A breadth-first walk from the same roots, only
through ancestors of what is sought, finds the same paths.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """How far to search backward, from objects that the program's variables do not reach to their holders.

    Attributes:
        targets: most objects to begin with. `gc.get_referrers` compares each reference of the heap with each
            of them: 64 take twice the time of one, 256 six times: 0.2 s in a heap of 370,000 objects, whose
            libraries take a second to walk.
        rounds: how often the whole heap is searched, 15 to 100 ms each. Ten take about as long as the walk
            over all libraries.
        holders: most objects to find: if there are more, something large is held in many ways.
        alike: nodes of one kind to begin with. A loop makes hundreds that are all held in the same way,
            mostly by C++ alone, and a container that leads to a few leads to the others.
    """

    targets: int = 256
    rounds: int = 10
    holders: int = 4096
    alike: int = 8


LIMITS: Final = SearchLimits()
_SOUGHT: Final = frozenset((TENSOR, NODE, FUTURE, SAVED, PLACEHOLDER))
"""Kinds of objects that hold memory of tensors: all of them in libraries are found."""


def enter_holders_of_tensors(
    walker: HeapWalker, libraries: NamedModules, wanted_containers: WantedContainers
) -> bool:
    """Enter the objects of libraries that lead to tensors and wanted containers, and what these lead to.

    Then the same for memtriage's own modules. What no root reaches is left in `walker.everything`.

    Args:
        walker: has walked the program's own variables.
        libraries: their modules, with names.
        wanted_containers: if too much leads to the containers that it returns, they are left out.

    Returns:
        Whether that was done. If not, too much leads to tensors, and the libraries still have to be walked.
    """
    graph = walker.graph
    sought = _that_hold_tensors(walker)
    holders = _ancestors(walker, sought, libraries)
    if holders is None:
        return False
    # No variable for the growable containers: it would look like another holder of the wanted ones.
    groups = walker.everything.by_type.values()
    growable = chain.from_iterable(group for group in groups if base_of(type(group[0])) is not None)
    containers = list(wanted_containers(not_among(list(growable), graph.index)))
    of_containers = _ancestors(walker, containers, libraries, own=(sought, holders))
    if of_containers is not None:
        sought += containers
        holders |= of_containers
    del containers, of_containers  # these references would look like references from outside
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
    return True


def _that_hold_tensors(walker: HeapWalker) -> list[Any]:
    """Return the objects that have memory of tensors and were not reached."""
    index, kinds = walker.graph.index, walker.kinds
    groups = walker.everything.by_type.values()
    sought = (group for group in groups if kinds[type(group[0])] in _SOUGHT)
    return list(not_among(list(chain.from_iterable(sought)), index))


def _ancestors(
    walker: HeapWalker, sought: list[Any], libraries: NamedModules, own: Sequence[Any] = ()
) -> dict[int, Any] | None:
    """Return all objects through which roots lead to the sought objects, including these, by id.

    Args:
        walker: has what was reached.
        sought: the objects to begin with.
        libraries: whose modules are roots.
        own: other lists of this search that refer to objects of the program. They must not be taken for
            holders: in a dict that contains itself, they would keep these objects alive until a collection.

    Returns:
        None if there are too many.
    """
    index, kinds = walker.graph.index, walker.kinds
    roots = {id(variables_of(module)) for _, module in [*libraries, *own_modules()]}
    ancestors = {id(obj): obj for obj in sought}
    most = len(ancestors) + LIMITS.holders
    waiting = _few_nodes(walker, sought)
    passed_over = {id(part) for part in (sought, ancestors, waiting, *own)}
    for _ in range(LIMITS.rounds):
        if not waiting:
            return ancestors
        if len(waiting) > LIMITS.targets or len(ancestors) > most:
            break
        # Pass this tuple on as it is: from CPython 3.13 on, the call itself only leaves out its own copy.
        targets = tuple(waiting)
        referrers = gc.get_referrers(*targets)
        waiting.clear()
        for referrer in referrers:
            key, kind = id(referrer), kinds[type(referrer)]
            if key in ancestors or key in passed_over or kind in (ATOM, BOUNDARY) or referrer is targets:
                continue
            is_root = key in roots or kind == KLASS
            if key in index and not (is_root and index[key] < 0):
                continue
            ancestors[key] = referrer
            if not is_root:
                waiting.append(referrer)
        del referrers, targets
    ancestors.clear()
    return None


def _few_nodes(walker: HeapWalker, sought: list[Any]) -> list[Any]:
    """Return these objects, but only a few of each kind of node."""
    seen: dict[int, int] = {}
    few = []
    for obj in sought:
        kind = id(type(obj))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= LIMITS.alike or walker.kinds[type(obj)] != NODE:
            few.append(obj)
    return few


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
