"""Compute what many Python objects of another process refer to, for all of them at once.

The results, and their order, are those of `RemoteHeap.referents` for one object, which would take too long
for a million objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.observe.kinds import ATOM
from memtriage.outside.memory import Words
from memtriage.outside.objects import HEAP_TYPE, HIGHEST, RemoteHeap, RemoteType
from memtriage.outside.values import MOST_ITEMS

(NOTHING, DICT, LIST, TUPLE, SET, FIXED, CLASS, ALONE) = range(8)
"""How the built-in part of an object is read: it has none, by one of these layouts, as words at fixed
offsets, as a class, or by `RemoteHeap.referents` because the layout is rare."""
_MOST_EDGES: Final = 30_000_000
"""References of one batch: beyond it containers of the batch are left out, as no process has them."""
_MOST_SKIPPED: Final = 4
_PARTS: Final = 16
_LOW_FLAGS: Final = 0xFFFFFFFF
_COLUMNS: Final = ("kind", "instance", "layout", "fixed", "own_from", "own_words", "managed", "dict_offset",
                   "size", "item_size", "keys", "address", "flags")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Edges:
    """References: `children[i]` is an address that object number `holders[i]` of the batch refers to."""

    children: Words
    holders: Words


class ClassRows:
    """Facts about classes as columns, so that those of many objects are looked up at once.

    Args:
        kind_of: how the instances of the class at an address are walked; `ATOM` where there is no class.
    """

    def __init__(self, heap: RemoteHeap, kind_of: Callable[[int], int]) -> None:
        self._heap = heap
        self._kind_of = kind_of
        self.fixed = list(heap.fixed.values())
        self._layouts: dict[type, tuple[int, int]] = {
            dict: (DICT, 0), list: (LIST, 0), tuple: (TUPLE, 0), set: (SET, 0), frozenset: (SET, 0),
            type: (CLASS, 0), **{klass: (FIXED, at) for at, klass in enumerate(heap.fixed)},
        }  # fmt: skip
        self._known = np.zeros(0, np.int64)
        self._row_of = np.zeros(0, np.int64)
        self._table = np.zeros((256, len(_COLUMNS)), np.int64)
        self._skipped = np.full((256, _MOST_SKIPPED), -1, np.int64)
        self._count = 0

    def rows(self, classes: Words) -> Words:
        """Return the row of each class, by the addresses of the classes."""
        if not len(classes):
            return classes
        at = np.searchsorted(self._known, classes)
        at[at == len(self._known)] = 0
        known = self._known[at] == classes if len(self._known) else np.zeros(len(classes), bool)
        if not known.all():
            self._learn(np.unique(classes[~known]).tolist())
            at = np.searchsorted(self._known, classes)
        return self._row_of[at]

    def column(self, name: str, rows: Words) -> Words:
        found: Words = self._table[:, _COLUMNS.index(name)][rows]
        return found

    def skipped(self, rows: Words) -> Words:
        found: Words = self._skipped[rows]
        return found

    def class_at(self, row: int) -> RemoteType | None:
        """Return the class of a row."""
        return self._heap.class_at(int(self._table[row, _COLUMNS.index("address")]))

    def _learn(self, addresses: list[int]) -> None:
        rows = []
        for address in addresses:
            if self._count == len(self._table):
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
                self._skipped = np.concatenate([self._skipped, np.full_like(self._skipped, -1)])
            rows.append(self._count)
            self._table[self._count] = self._row(address)
            klass = self._heap.class_at(address)
            if klass is not None:
                skipped = sorted(klass.skipped)[:_MOST_SKIPPED]
                self._skipped[self._count, : len(skipped)] = skipped
            self._count += 1
        known = np.concatenate([self._known, np.array(addresses, np.int64)])
        row_of = np.concatenate([self._row_of, np.array(rows, np.int64)])
        order = np.argsort(known, kind="stable")
        self._known, self._row_of = known[order], row_of[order]

    def _row(self, address: int) -> tuple[int, ...]:
        klass = self._heap.class_at(address) if address > 0 else None
        if klass is None:
            return (ATOM, 0, NOTHING, 0, 0, 0, 0, 0, 0, 0, 0, address, 0)
        built_in = self._heap.built_in(klass.shape) if klass.shape else None
        layout, fixed = (NOTHING, 0) if built_in is None else self._layouts.get(built_in, (ALONE, 0))
        if len(klass.skipped) > _MOST_SKIPPED or self._heap.is_read_alone(klass):
            layout = ALONE
        own_words = max(0, klass.size - klass.own_from) >> 3
        return (
            self._kind_of(address), int(klass.address != klass.shape), layout, fixed,
            klass.own_from, own_words, int(klass.managed), klass.dict_offset, klass.size,
            klass.item_size, klass.cached_keys, address, klass.flags & _LOW_FLAGS,
        )  # fmt: skip


class References:
    """What objects refer to."""

    def __init__(self, heap: RemoteHeap, classes: ClassRows) -> None:
        self._heap = heap
        self._memory = heap.memory
        self._layout = heap.layout
        self._classes = classes

    def of(self, objects: Words, rows: Words) -> Edges:
        """Return what objects refer to, in the order of the objects and of `RemoteHeap.referents`."""
        parts: list[tuple[int, Words, Words]] = []  # number of the part, children, holders
        layouts = self._classes.column("layout", rows)
        alone = np.flatnonzero(layouts == ALONE)
        if len(alone):
            parts.append(self._one_by_one(objects, alone))
        together = layouts != ALONE
        instances = np.flatnonzero(together & (self._classes.column("instance", rows) != 0))
        if len(instances):
            parts += self._instances(objects[instances], rows[instances], instances)
        for layout, read in (
            (DICT, self._dicts), (LIST, self._lists), (TUPLE, self._tuples), (SET, self._sets),
            (CLASS, self._class_objects),
        ):  # fmt: skip
            chosen = np.flatnonzero(layouts == layout)
            if len(chosen):
                parts += [(8 + at, *part) for at, part in enumerate(read(objects[chosen], chosen))]
        fixed = np.flatnonzero(layouts == FIXED)
        if len(fixed):
            which = self._classes.column("fixed", rows[fixed])
            for at, offsets in enumerate(self._classes.fixed):
                chosen = fixed[which == at]
                if len(chosen):
                    parts.append((8, *self._at_offsets(objects[chosen], chosen, offsets)))
        return _in_order(parts)

    def _one_by_one(self, objects: Words, chosen: Words) -> tuple[int, Words, Words]:
        children: list[int] = []
        holders: list[int] = []
        for at in chosen.tolist():
            referents = self._heap.referents(int(objects[at]))
            children += referents
            holders += [at] * len(referents)
        return 0, _words(children), np.array(holders, np.int64)

    def _instances(self, objects: Words, rows: Words, holders: Words) -> Iterable[tuple[int, Words, Words]]:
        column = self._classes.column
        counts = _bounded(column("own_words", rows))
        if counts.any():
            starts = column("own_from", rows)
            words, which = self._memory.spans(objects + starts, counts)
            within = np.arange(len(words)) - np.repeat(np.cumsum(counts) - counts, counts)
            offsets = starts[which] + 8 * within
            followed = (words > 4096) & (words < HIGHEST) & (words & 15 == 0)
            skipped = self._classes.skipped(rows)
            for at in range(skipped.shape[1]):
                followed &= offsets != skipped[which, at]
            yield 0, words[followed], holders[which[followed]]
        managed = column("managed", rows) != 0
        own = np.zeros(len(objects), np.int64)
        if managed.any():
            chosen = np.flatnonzero(managed)
            classes = rows[chosen]
            values, own[chosen] = self._heap.managed(
                objects[chosen], column("size", classes), column("flags", classes)
            )
            inline = np.flatnonzero(values != 0)
            if len(inline):
                chosen = chosen[inline]
                yield 1, *self._entries(column("keys", rows[chosen]), values[inline], holders[chosen])
        offsets = np.where(managed, 0, column("dict_offset", rows))
        placed = np.flatnonzero(offsets > 0)
        if len(placed):
            own[placed] = self._memory.data[self._memory.places(objects[placed] + offsets[placed])]
        ended = np.flatnonzero(offsets < 0)
        if len(ended):
            places = self._memory.places(objects[ended] + self._layout.size)
            length = np.abs(self._memory.data[places])
            length[length > MOST_ITEMS] = 0
            sizes, items = column("size", rows[ended]), column("item_size", rows[ended])
            behind = np.asarray(offsets[ended] + ((sizes + length * items + 7) // 8) * 8, np.int64)
            own[ended] = self._memory.data[self._memory.places(objects[ended] + behind)]
        with_dict = np.flatnonzero(own)
        yield 2, own[with_dict], holders[with_dict]
        yield 3, column("address", rows), holders

    def _at_offsets(self, objects: Words, holders: Words, offsets: list[int]) -> tuple[Words, Words]:
        places = self._memory.places(objects)
        words = self._memory.data[places[:, None] + np.array(offsets, np.int64)[None, :] // 8]
        return words.reshape(-1), np.repeat(holders, len(offsets))

    def _class_objects(self, objects: Words, holders: Words) -> list[tuple[Words, Words]]:
        layout, memory = self._layout, self._memory
        flags = memory.data[memory.places(objects) + layout.type_flags // 8]
        made = np.flatnonzero(flags & HEAP_TYPE)
        offsets = [layout.type_dict, layout.type_mro, layout.type_bases, layout.type_base]
        return [self._at_offsets(objects[made], holders[made], offsets)]

    def _lists(self, objects: Words, holders: Words) -> list[tuple[Words, Words]]:
        words, which = self._list_words(objects)
        torn = np.unique(which[(words <= 4096) | (words & 7 != 0)])
        if len(torn):
            self._heap.renew(objects[torn])
            words, which = self._list_words(objects)
        return [(words, holders[which])]

    def _list_words(self, objects: Words) -> tuple[Words, Words]:
        data, places = self._memory.data, self._memory.places(objects)
        counts = _bounded(data[places + self._layout.size // 8])
        last = data[places + self._layout.list_items // 8] + 8 * (counts - 1)
        return self._memory.spans(last, counts, -8)

    def _tuples(self, objects: Words, holders: Words) -> list[tuple[Words, Words]]:
        counts = _bounded(self._memory.data[self._memory.places(objects) + self._layout.size // 8])
        last = objects + self._layout.tuple_items + 8 * (counts - 1)
        words, which = self._memory.spans(last, counts, -8)
        return [(words, holders[which])]

    def _sets(self, objects: Words, holders: Words) -> list[tuple[Words, Words]]:
        data, places = self._memory.data, self._memory.places(objects)
        counts = _bounded(data[places + self._layout.set_mask // 8] + 1)
        words, which = self._memory.spans(data[places + self._layout.set_table // 8], counts, 16)
        return [(words, holders[which])]

    def _dicts(self, objects: Words, holders: Words) -> list[tuple[Words, Words]]:
        memory, layout = self._memory, self._layout
        places = memory.places(objects)
        keys = memory.places(memory.data[places + layout.dict_keys // 8])
        entries = _bounded(memory.data[keys + layout.keys_entries // 8])
        self._heap.renew(objects[entries < _bounded(memory.data[places + layout.size // 8])])
        data, places = memory.data, memory.places(objects)
        keys, values = data[places + layout.dict_keys // 8], data[places + layout.dict_values // 8]
        if not (values != 0).any():
            return [self._entries(keys, None, holders)]
        split, whole = np.flatnonzero(values != 0), np.flatnonzero(values == 0)
        return [
            self._entries(keys[whole], None, holders[whole]),
            self._entries(keys[split], values[split], holders[split]),
        ]

    def _entries(self, keys: Words, values: Words | None, holders: Words) -> tuple[Words, Words]:
        """Return the values of dicts, and their keys where these may be other things than strings."""
        layout, memory = self._layout, self._memory
        places = memory.places(keys)
        header = memory.data[places + 1]
        index_bits = header >> 8 * (layout.keys_log2_index_bytes - 8) & 0xFF
        of_strings = header >> 8 * (layout.keys_kind - 8) & 0xFF != 0
        counts = memory.data[places + layout.keys_entries // 8]
        counts = np.where((places > 0) & (index_bits <= 40), counts, 0)
        counts = _bounded(counts)
        if values is not None:
            words, which = memory.spans(values + layout.values_start, counts)
            return words, holders[which]
        starts = keys + layout.keys_indices + (np.int64(1) << np.minimum(index_bits, 40))
        words, which = memory.spans(starts + 8, np.where(of_strings, counts, 0), 16)
        mixed = np.flatnonzero(~of_strings & (counts > 0))
        if not len(mixed):
            return words, holders[which]
        named, of = memory.spans(starts[mixed] + 8, counts[mixed], 24)
        valued, _ = memory.spans(starts[mixed] + 16, counts[mixed], 24)
        used = valued != 0
        pairs = np.column_stack([named[used], valued[used]]).reshape(-1)
        both = np.concatenate([words, pairs])
        which = np.concatenate([which, np.repeat(mixed[of[used]], 2)])
        order = np.argsort(which, kind="stable")
        return both[order], holders[which[order]]


def _bounded(counts: Words) -> Words:
    """Return counts of items; 0 for those, and from where on, no process has so many."""
    counts = np.where((counts > 0) & (counts <= MOST_ITEMS), counts, 0)
    if counts.sum() > _MOST_EDGES:
        counts[np.cumsum(counts) > _MOST_EDGES] = 0
    return counts


def _words(values: list[int]) -> Words:
    return np.array([value if value < 1 << 62 else 0 for value in values], np.int64)


def _in_order(parts: list[tuple[int, Words, Words]]) -> Edges:
    if not parts:
        return Edges(np.zeros(0, np.int64), np.zeros(0, np.int64))
    children = np.concatenate([words for _, words, _ in parts])
    holders = np.concatenate([of for _, _, of in parts])
    if len(parts) > 1:
        numbers = np.concatenate([np.full(len(of), number) for number, _, of in parts])
        order = np.argsort(holders * _PARTS + numbers, kind="stable")
        children, holders = children[order], holders[order]
    return Edges(children, holders)
