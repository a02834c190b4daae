"""The Python objects of the process, as the cyclic collector lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from memtriage.process.stdlib import gc


def tracked_objects() -> list[Any]:
    """Return every object that the collector tracks. The list keeps them all alive: drop it soon.

    Known limitations: objects that `gc.freeze()` has put aside are not tracked, nor is what can hold no other
    object, such as texts, numbers and the dicts and tuples of only those.
    """
    return gc.get_objects()


def tuple_items(value: tuple[Any, ...]) -> list[Any]:
    """Return the items of a tuple in order; of one still being built, those that are there, in no order.

    `tuple(generator)` makes the tuple, which the collector tracks from then on, before the generator fills
    its places. Reading an empty place in any other way crashes the interpreter (bpo-15108); the collector
    passes over it. A subclass's own methods are not asked.
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
        is_wanted: is asked once of each type. Ask it of types only: `isinstance` asks the object as well,
            and a weak proxy without its referent raises.
    """
    # A class of the usual metaclass is hashed by its address. Another metaclass may hash and compare its
    # classes with code of its own, so that their addresses are looked up. Not for all: the number that `id`
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
