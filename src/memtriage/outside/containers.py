"""Containers of ordinary data that grow in another process: what holds arrays, texts, numbers and records."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.account.holder_facts import store_of
from memtriage.model.evidence import DataSeen
from memtriage.model.paths import ANY_ITEM, HolderPath
from memtriage.observe.kinds import ARRAY, PLAIN
from memtriage.observe.sites import named_line
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.kinds import Kinds
from memtriage.outside.loaded_modules import RemoteModules
from memtriage.outside.memory import ProcessMemory, RemoteMemory, Words
from memtriage.outside.naming import RemoteNamer
from memtriage.outside.objects import RemoteHeap, RemoteType
from memtriage.outside.values import MOST_ITEMS, Translate

_GROWABLE: Final = (list, dict, set, deque)
_MOST: Final = 2_000
"""Containers that grew which are named at most, those with most new entries."""
_NEWEST: Final = 4
_PARTS: Final = 2_000
"""Objects of an entry that are counted at most."""
_UNIT: Final = 16
_COLLECTED: Final = 16
"""Bytes before an object that the collector follows."""
_DATA, _DIMENSIONS, _SHAPE, _STRIDES, _BASE = 16, 24, 32, 40, 48
"""Of numpy's arrays, since its first release."""
_PIXEL: Final = {"1": 1, "L": 1, "P": 1, "LA": 4, "RGB": 4, "RGBA": 4, "CMYK": 4, "I": 4, "F": 4}
"""Bytes of a pixel in Pillow's memory."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of the containers of one reading, by address, in the order of the addresses."""

    addresses: Words
    lengths: Words

    def of(self, addresses: Words) -> Words:
        """Return the lengths of containers; -1 of those that are not known."""
        if not len(self.addresses):
            return np.full(len(addresses), -1)
        at = np.minimum(np.searchsorted(self.addresses, addresses), len(self.addresses) - 1)
        return np.where(self.addresses[at] == addresses, self.lengths[at], -1)


class RemoteContainers:
    """Follows the containers of one process from reading to reading.

    Args:
        root: folder of the program's script, for lines of its source.
    """

    def __init__(self, root: str | None) -> None:
        self._root = root
        self._before: Lengths | None = None
        self._before_walk: Lengths | None = None
        self._known: dict[int, DataSeen] = {}
        self._numbers = 0

    def begin(self, memory: RemoteMemory, size: int) -> None:
        """Note the lengths of known containers, at the instant at which the rest is copied."""
        if self._before is not None:
            addresses = self._before.addresses
            self._before_walk = Lengths(addresses, memory.live(addresses + size, 1)[:, 0])

    def add(
        self, graph: RemoteGraph, namer: RemoteNamer, translate: Translate, modules: RemoteModules
    ) -> list[DataSeen]:
        """Return the containers that have grown since an earlier reading, by path.

        Containers that have one path, such as those of a dict of lists, count together.
        """
        now, positions = _lengths(graph)
        if self._before_walk is not None:
            then = self._before_walk.of(now.addresses)
            now = Lengths(now.addresses, np.where(then >= 0, then, now.lengths))
        before, self._before = self._before, now
        if before is None:
            return []
        earlier = before.of(now.addresses)
        more = np.where(earlier >= 0, now.lengths - earlier, 0)
        grown = np.flatnonzero(more > 0)
        if not len(grown):
            return []
        grown = grown[np.argsort(-more[grown], kind="stable")][:_MOST]
        by_path: dict[HolderPath, list[int]] = {}
        for at in grown.tolist():
            by_path.setdefault((*namer.path(int(positions[at])).anchor, ANY_ITEM), []).append(at)
        sizes = _EntrySizes(graph.heap, translate)
        found: dict[int, DataSeen] = {}
        for path, members in by_path.items():
            addresses, first = now.addresses[members].tolist(), int(positions[members[0]])
            entry_bytes = sizes.of_newer(graph.objects[first], int(earlier[members[0]]))
            if entry_bytes is None:
                continue
            known = next((self._known[each] for each in addresses if each in self._known), None)
            self._numbers += known is None
            classes = _classes(graph, first)
            klass = graph.type_at(first)
            entries = int(now.lengths[members].sum())
            seen = DataSeen(
                id=self._numbers if known is None else known.id,
                path=path,
                kind="container" if klass is None else klass.name,
                entries=entries,
                entry_bytes=entry_bytes,
                before=entries - int(more[members].sum()) if known is None else None,
                stored_at=self.stored_at(path, modules.files_of(classes))
                if known is None
                else known.stored_at,
                classes=list(dict.fromkeys(name for each in classes for name in each.bases)),
            )
            found.setdefault(seen.id, seen)
            self._known |= dict.fromkeys(addresses, seen)
        sizes.close()
        return list(found.values())

    def stored_at(self, path: HolderPath, files: Sequence[str]) -> str | None:
        """Return the only line of these files that stores into a holder; None if that is not certain."""
        store = store_of(path, files)
        return None if store is None else named_line([(store.filename, store.line)], self._root)


def _lengths(graph: RemoteGraph) -> tuple[Lengths, Words]:
    """Return the lengths of all containers, and where they are in the graph."""
    heap, memory = graph.heap, graph.heap.memory
    positions = np.flatnonzero(np.array(graph.kinds, np.int64) == PLAIN)
    objects = np.array(graph.objects, np.int64)[positions]
    places = memory.places(objects)
    classes = memory.data[places + 1]
    known = [address for address in np.unique(classes).tolist() if _is_growable(heap, address)]
    chosen = np.flatnonzero(np.isin(classes, known))
    # As they are now: between the copies of their heads lie tenths of a second, in which they grow.
    lengths = memory.live(objects[chosen] + heap.layout.size, 1)[:, 0]
    sound = (lengths > 0) & (lengths <= MOST_ITEMS)
    chosen, lengths = chosen[sound], lengths[sound]
    order = np.argsort(objects[chosen], kind="stable")
    return Lengths(objects[chosen][order], lengths[order]), positions[chosen][order]


def _is_growable(heap: RemoteHeap, address: int) -> bool:
    klass = heap.class_at(address)
    return klass is not None and heap.is_a(klass, *_GROWABLE)


def _classes(graph: RemoteGraph, position: int) -> list[RemoteType]:
    """Return the classes of an object and of those that lead to it."""
    classes = []
    while position >= 0:
        klass = graph.type_at(position)
        if klass is not None:
            classes.append(klass)
        position = graph.parents[position]
    return classes


class _EntrySizes:
    """Sizes of entries, with what only they seem to hold, without tensors.

    They are read again: where a container that grows has its entries may not have been mapped at the start
    of the reading that found it.
    """

    def __init__(self, before: RemoteHeap, translate: Translate) -> None:
        assert isinstance(before.memory, ProcessMemory)
        self._heap = RemoteHeap(
            ProcessMemory(before.memory.pid, before.memory.opened), before.layout, translate, before
        )
        self._kinds = Kinds(self._heap, translate)

    def close(self) -> None:
        """Release the copy."""
        self._heap.memory.release()

    def of_newer(self, container: int, earlier: int) -> int | None:
        """Return the usual size of the entries that a container has got since it had so many.

        With their place in the container, and without what they share, which counts for the oldest of them.
        None where there are none: it has been cleared or freed.
        """
        seen: set[int] = {container}
        klass = self._heap.type_of(container)
        entries = [] if klass is None else self._entries(container, klass)
        newer = entries[earlier:]
        chosen = newer[:: max(1, len(newer) // _NEWEST)][: _NEWEST + 1]
        if klass is None or not chosen:
            return None
        sizes = [sum(self._deep(part, seen) for part in entry) for entry in chosen]
        return self._own(container, klass) // len(entries) + int(np.median(sizes[1:] or sizes))

    def _entries(self, container: int, klass: RemoteType) -> Sequence[tuple[int, ...]]:
        heap = self._heap
        if heap.is_a(klass, dict):
            return heap.dict_items(container)
        if heap.is_a(klass, list):
            items = heap.list_items(container)
        else:
            items = heap.deque_items(container) if heap.is_a(klass, deque) else heap.set_items(container)
        return [(item,) for item in items]

    def _deep(self, address: int, seen: set[int]) -> int:
        total, queue = 0, [address]
        for part in queue:
            if not part or part in seen or len(queue) > _PARTS:
                continue
            seen.add(part)
            klass = self._heap.type_of(part)
            if klass is None:
                continue
            kind = self._kinds.of_class(klass.address)
            if kind == ARRAY:
                base = self._heap.memory.word(part + _BASE)
                queue += [base] if base else []
                total += _rounded(klass.size) + (0 if base else self._array(part))
            elif kind == PLAIN and self._heap.is_exactly(klass, types.FunctionType):
                continue
            else:
                own = self._own(part, klass)
                total += own
                if kind == PLAIN:
                    queue += self._heap.referents(part)
        return total

    def _array(self, address: int) -> int:
        """Return the bytes of an array that has its memory itself, by its longest stride."""
        memory = self._heap.memory
        dimensions = memory.half(address + _DIMENSIONS)
        if not 0 < dimensions <= 64:
            return 0
        shape = memory.words(memory.word(address + _SHAPE), dimensions)
        strides = memory.words(memory.word(address + _STRIDES), dimensions)
        return max(
            (size * stride for size, stride in zip(shape, strides, strict=True) if stride < 1 << 48),
            default=0,
        )

    def _own(self, address: int, klass: RemoteType) -> int:
        """Return the bytes of one object, without what it refers to; 0 for those that are shared."""
        heap, memory, layout = self._heap, self._heap.memory, self._heap.layout
        length = memory.word(address + layout.size)
        length = length if length <= 1 << 40 else 0
        name = klass.bases[0]
        if name == "builtins.str":
            text = memory.half(address + layout.text_state)
            return _rounded(layout.text_ascii + (length + 1) * max(1, text >> 2 & 7))
        if name in ("builtins.bytes", "builtins.bytearray"):
            return _rounded(klass.size + length)
        if name in ("builtins.int", "builtins.float", "builtins.complex"):
            return _rounded(klass.size + 4)
        if heap.is_a(klass, list):
            return _rounded(klass.size + _COLLECTED) + 8 * length
        if heap.is_a(klass, tuple):
            return _rounded(klass.size + _COLLECTED + 8 * length)
        if heap.is_a(klass, dict):
            return _rounded(klass.size + _COLLECTED) + 48 + 32 * length
        if heap.is_a(klass, set, frozenset, deque):
            return _rounded(klass.size + _COLLECTED) + 24 * length
        return _rounded(klass.size + _COLLECTED) + self._picture(address, klass)

    def _picture(self, address: int, klass: RemoteType) -> int:
        """Return the bytes of an image of Pillow, which only its library knows."""
        if "PIL.Image.Image" not in klass.bases:
            return 0
        heap = self._heap
        values = dict(heap.attributes(address, klass))
        sides = [heap.number(side) or 0 for side in heap.tuple_items(values.get("_size", 0))]
        mode = heap.text(values.get("_mode", values.get("mode", 0))) or ""
        return int(np.prod(sides)) * _PIXEL.get(mode, 4) if len(sides) == 2 else 0


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _UNIT) * _UNIT
