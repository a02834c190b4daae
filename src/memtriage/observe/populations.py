"""Containers with very many Python objects, which forked workers un-share merely by reading them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any, Final

from memtriage.observe.classes import exactly, size_of
from memtriage.observe.containers import deep_size
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import ARRAY, TENSOR
from memtriage.observe.objects import tuple_items

_LEAST_ENTRIES: Final = 20_000
"""Containers with fewer entries are not data sets: 20,000 objects of 100 bytes are 2 MB."""
_SAMPLED: Final = 16
_IMMORTAL: Final = 1 << 29
"""No object has this many references. From CPython 3.12 on, such a count marks objects that are never freed,
such as interned strings: their references are not counted, so reading them writes nothing."""


def largest_population(graph: HeapGraph) -> tuple[int, int, int] | None:
    """The container of the program with most bytes in Python objects: (position, entries, bytes).

    Bytes are estimated from a few entries spread over it. Tensors and arrays are left out, because reading
    them only writes their own small header; immortal objects are left out, too. None if no container is
    large.
    """
    best: tuple[int, int, int] | None = None
    # From `first_own` on there are memtriage's own objects, then what only an evaluation stack leads to, such
    # as the loader in `for batch in DataLoader(...)`.
    reachable = chain(range(graph.first_own), range(graph.first_unrooted, graph.first_garbage))
    for position in reachable:
        obj = graph.objects[position]
        if not exactly(obj, list, dict, tuple, set) or len(obj) < _LEAST_ENTRIES:
            continue
        entry_size = _mean_size(graph, obj)
        if entry_size * len(obj) > (0 if best is None else best[2]):
            best = (position, len(obj), round(entry_size * len(obj)))
    return best


def _mean_size(graph: HeapGraph, container: Any) -> float:
    entries: Iterable[Any] = container
    if type(container) is dict:
        entries = container.items()
    elif type(container) is tuple:
        entries = tuple_items(container)
    every = max(1, len(container) // _SAMPLED)
    sample = list(islice(entries, 0, None, every))[:_SAMPLED]
    pairs = type(container) is dict
    written = [entry for entry in sample if not all(map(_immortal, entry if pairs else (entry,)))]
    return sum(_size(graph, entry) for entry in written) / max(1, len(sample))


def _immortal(obj: object) -> bool:
    return sys.getrefcount(obj) >= _IMMORTAL


def _size(graph: HeapGraph, entry: Any) -> int:
    if graph.kinds[type(entry)] in (TENSOR, ARRAY):
        return size_of(entry)
    return deep_size(graph.kinds, entry)
