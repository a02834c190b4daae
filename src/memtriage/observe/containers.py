"""Containers that grow between two walks: how leaks of ordinary Python data and numpy arrays are named."""

from __future__ import annotations

import gc
import sys
import types
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from itertools import islice
from typing import Any

from memtriage.observe.heap import HeapGraph
from memtriage.observe.kinds import ARRAY, PLAIN

_SIZED: frozenset[type] = frozenset([list, dict, set, deque, OrderedDict, defaultdict, bytearray])
_ITEM_LIMIT = 2000
_UNSHARED_REFERENCES = 6
"""An entry's own atom is referred to by the entry, the walk's graph or queue, and the counting itself."""


@dataclass(frozen=True, slots=True)
class GrownContainer:
    """A container with more entries than before.

    Attributes:
        position: its place in the later walk's graph.
        more: entries more than at the earlier walk.
        entry_bytes: size of a recent entry with what only it seems to hold, tensors left out.
        native: type of a recent entry that is an object of a C++ library, with memory that only it knows of.
        kind: its type's name.
    """

    position: int
    more: int
    entry_bytes: int
    native: str | None
    kind: str


def container_lengths(graph: HeapGraph) -> dict[int, tuple[int, int | None]]:
    """(number of entries, id of the first) of every growable container, by id.

    The first entry tells a container that was there before from a new one at the same address (-1 for kinds
    that have none to go by, None for an empty one).
    """
    return {id(obj): (len(obj), _first(obj)) for obj in graph.objects if type(obj) in _SIZED}


def grown_containers(
    graph: HeapGraph, before: dict[int, tuple[int, int | None]], most: int = 20
) -> list[GrownContainer]:
    """Containers that were there before and have more entries now, by the bytes that came."""
    found = []
    # Behind `first_own` come memtriage's own objects and what no variable of the program leads to.
    for position, obj in enumerate(graph.objects[: graph.first_own]):
        if type(obj) not in _SIZED:
            continue
        earlier, first = before.get(id(obj), (0, None))
        if not earlier or len(obj) <= earlier or first != _first(obj):
            continue
        more = len(obj) - earlier
        newest = _newest(obj)
        entry = sum(deep_size(graph, each) for each in newest) // max(1, len(newest))
        native = next((name for each in newest if (name := _native_type(each)) is not None), None)
        found.append(GrownContainer(position, more, entry, native, type(obj).__name__))
    found.sort(key=lambda grown: -grown.more * grown.entry_bytes)
    return found[:most]


def _first(container: Any) -> int | None:
    if type(container) in (bytearray, set):  # a set has no order that lasts
        return -1
    return next((id(entry) for entry in container), None)


def _newest(container: Any) -> list[Any]:
    """Up to four of the newest entries; order is insertion's where the container has one."""
    if isinstance(container, dict):
        return [(key, container[key]) for key in islice(reversed(list(container)), 4)]
    if isinstance(container, set):
        return list(islice(container, 4))
    if isinstance(container, bytearray):
        return [b"\0"]
    return [container[-offset] for offset in range(1, min(4, len(container)) + 1)]


def _native_type(entry: Any) -> str | None:
    """Name of the C++ type (made by pybind11) of an entry, or of a part of it."""
    for part in entry if isinstance(entry, tuple) else (entry,):
        if any(type(base).__name__ == "pybind11_type" for base in type(part).__mro__):
            return type(part).__name__
    return None


def deep_size(graph: HeapGraph, obj: Any) -> int:
    """Bytes of an object and of the plain data and arrays below it, at most so many objects of them.

    Tensors, modules, classes and functions are left out: they are accounted for elsewhere or shared.
    """
    seen: set[int] = set()
    queue = [obj]
    total = 0
    for each in queue:
        if id(each) in seen or len(seen) >= _ITEM_LIMIT:
            continue
        seen.add(id(each))
        kind = graph.kinds[type(each)]
        if kind == ARRAY:
            if each.base is None:
                total += int(each.nbytes)
            else:
                queue.append(each.base)
        elif issubclass(type(each), (str, bytes, bytearray, int, float, complex)):
            # Small numbers and interned words belong to everybody. What is asked for counts whoever has it.
            if each is obj or sys.getrefcount(each) <= _UNSHARED_REFERENCES:
                total += sys.getsizeof(each)
        elif kind == PLAIN and type(each) not in (types.FunctionType, types.FrameType):
            total += sys.getsizeof(each, 0)
            queue.extend(gc.get_referents(each))
    return total
