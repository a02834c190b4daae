"""The Python objects of the process that the cyclic collector lists."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from itertools import chain, compress
from operator import not_
from typing import Any

from memtriage.process.stdlib import gc


def tracked_objects() -> list[Any]:
    """Return every object that the collector tracks. The list keeps them all alive: drop it soon.

    Known limitations: objects frozen by `gc.freeze()` are not tracked, nor are objects that cannot refer to
    others, such as texts, numbers and the dicts and tuples of only those.
    """
    return gc.get_objects()


def not_among(objects: list[Any], ids: Container[int]) -> Iterator[Any]:
    """Yield the objects whose ids are not among some."""
    return compress(objects, map(not_, map(ids.__contains__, map(id, objects))))


class Listing:
    """Objects in order and by type, for queries that do not look at each of some hundred thousand.

    An object's type is looked up by its id, because a metaclass may hash its classes with its own code.

    Args:
        objects: the objects; the listing keeps them alive.

    Attributes:
        by_type: the objects by their types' ids, in the order in which the types are first met.
    """

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects
        by_type: defaultdict[int, list[Any]] = defaultdict(list)
        for obj in objects:
            by_type[id(type(obj))].append(obj)
        self.by_type = by_type

    def of_types(self, types: Container[int]) -> Iterator[Any]:
        """Yield the objects whose types' ids are among some, type by type."""
        return chain.from_iterable(group for key, group in self.by_type.items() if key in types)

    def among(self, ids: Container[int]) -> Iterator[Any]:
        """Yield the objects whose ids are among some."""
        return compress(self.objects, map(ids.__contains__, map(id, self.objects)))

    def clear(self) -> None:
        """Release the objects, but not the lists: a walk that passes these over knows them by their ids."""
        for part in (self.objects, *self.by_type.values()):
            part.clear()


def array_base(array: Any) -> Any:
    """The object that has the memory of a numpy array, by numpy's own getter; None if it is the array."""
    return sys.modules["numpy"].ndarray.base.__get__(array)


def array_bytes(array: Any) -> int:
    """Bytes of the elements of a numpy array, by numpy's own getter."""
    return int(sys.modules["numpy"].ndarray.nbytes.__get__(array))


def tuple_items(value: tuple[Any, ...]) -> list[Any]:
    """Return the items of a tuple in order; if it is still being built, its present items in no order.

    `tuple(generator)` makes the tuple, which the collector then tracks, before the generator fills its slots.
    Reading an empty slot in any other way crashes the interpreter (bpo-15108); the collector skips it.
    Methods of subclasses are not called.
    """
    if type(value) is tuple:
        present = gc.get_referents(value)
        if len(present) < len(value):
            return present
    return list(tuple.__iter__(value))


def instances(is_wanted: Callable[[type], bool]) -> Iterator[Any]:
    """Yield the tracked objects whose types are wanted, with the limitations of `tracked_objects`.

    All tracked objects stay alive until the iteration ends.

    Args:
        is_wanted: called once per type. It must not use the objects: `isinstance` on a weak proxy whose
            referent is gone raises.
    """
    # A class of the usual metaclass is hashed by its address. Another metaclass may hash and compare its
    # classes with its own code, so these are looked up by address. Not all are, because the number that `id`
    # makes for each object would take 10 us while tracemalloc follows every allocation.
    usual: dict[type, bool] = {}
    others: dict[int, bool] = {}
    for obj in tracked_objects():
        kind = type(obj)
        if type(kind) is type:
            wanted = usual.get(kind)
            if wanted is None:
                wanted = usual[kind] = is_wanted(kind)
        else:
            wanted = others.get(id(kind))
            if wanted is None:
                wanted = others[id(kind)] = is_wanted(kind)
        if wanted:
            yield obj
