"""Which items a program's `DataLoader` will return, in which batches, before they are made.

The order of an epoch is read from its sampler's iterator without advancing it: most samplers have all indices
in one list. No code of the program runs, and no random number is drawn.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import GeneratorType
from typing import Any, Final

import numpy as np

from memtriage.observe.classes import exactly
from memtriage.observe.item_lengths import MOST_NUMBERS, Integers, item_lengths, numbers
from memtriage.observe.process_tree import name_of_loader, workers_of
from memtriage.process.replaced import Replaced, leave_out_caller
from memtriage.process.stdlib import os

_LIST_ITERATOR: Final[type] = type(iter([]))
_RANGE_ITERATOR: Final[type] = type(iter(range(0)))


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What is known about the batches of an epoch.

    Attributes:
        lengths: lengths of the items of the data set.
        size: items of a batch, if the order is not known.
        batches: the number of items and the longest item's length of each batch, in order; None if a sampler
            draws the order as it goes.
    """

    lengths: Integers
    size: int | None = None
    batches: tuple[Integers, Integers] | None = None


class Epoch:
    """One pass over a `DataLoader`, followed without keeping it alive.

    Args:
        loader: the `DataLoader`.
        batches: its iterator.
        name: what the program calls the loader.

    Attributes:
        name: as given.
    """

    def __init__(self, loader: Any, batches: Any, name: str = "") -> None:
        self.name = name
        self._loader = weakref.ref(loader)
        self._batches = weakref.ref(batches)

    @property
    def workers(self) -> list[int]:
        """Processes of its workers, in their order."""
        return workers_of(self._batches())

    @property
    def given(self) -> int | None:
        """Batches that the program has taken; None once the iterator is gone."""
        given = getattr(self._batches(), "_num_yielded", None)
        return given if type(given) is int else None

    def is_of(self, other: Epoch) -> bool:
        """Whether both have the same loader."""
        return self._loader() is not None and self._loader() is other._loader()

    def plan(self) -> EpochPlan | None:
        """Return what is known about the batches; None if it cannot be read without side effects."""
        batches = self._batches()
        if batches is None or not batches._auto_collation:
            return None
        lengths = item_lengths(batches._dataset)
        if lengths is None or lengths.min() == lengths.max():
            return None
        order = _order(batches)
        if order is None:
            size = getattr(batches._index_sampler, "batch_size", None)
            return EpochPlan(lengths, size) if type(size) is int and size > 0 else None
        items, starts = order
        if items.min() < 0 or items.max() >= len(lengths):
            return None
        count = np.diff(starts, append=len(items))
        return EpochPlan(lengths, None, (count, np.maximum.reduceat(lengths[items], starts)))


class LoaderHook:
    """Reports each pass over a `DataLoader`.

    Args:
        begins: gets the pass when it begins. Must not raise.
    """

    def __init__(self, begins: Callable[[Epoch], None]) -> None:
        self._begins = begins
        self._replaced: Replaced | None = None

    def install(self) -> None:
        """Begin to report. torch must be imported."""
        from torch.utils.data import DataLoader

        begins, pid, original = self._begins, os.getpid(), DataLoader.__iter__

        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            try:
                batches = original(loader)
            except BaseException as error:
                leave_out_caller(error)
                raise
            if os.getpid() == pid:
                begins(Epoch(loader, batches, name_of_loader(loader, sys._getframe(1))))
            return batches

        self._replaced = Replaced(DataLoader)
        self._replaced.put(__iter__=iterate)

    def remove(self) -> None:
        """Restore the class."""
        if self._replaced is not None:
            self._replaced.restore()
            self._replaced = None


def _order(batches: Any) -> tuple[Integers, Integers] | None:
    """Return the items of an epoch in order, and where each batch starts; None if unknown."""
    from torch.utils.data import BatchSampler

    # Workers get batches ahead of those that the program takes.
    asked = getattr(batches, "_send_idx", batches._num_yielded)
    sampler = batches._sampler_iter
    if type(sampler) is GeneratorType and sampler.gi_code is BatchSampler.__iter__.__code__:
        size, drop_last = batches._index_sampler.batch_size, batches._index_sampler.drop_last
        kinds = (GeneratorType, _LIST_ITERATOR, _RANGE_ITERATOR)
        inner = {id(each): each for each in gc.get_referents(sampler) if exactly(each, *kinds)}
        if len(inner) != 1:
            return None
        items = numbers(_whole(inner.popitem()[1], asked * size))
        if items is None:
            return None
        if drop_last:
            items = items[: len(items) // size * size]
        return (items, np.arange(0, len(items), size)) if len(items) else None
    whole = _whole(sampler, asked)
    if type(whole) is not list or any(type(batch) is not list or not batch for batch in whole):
        return None
    if sum(map(len, whole)) > MOST_NUMBERS:
        return None
    items = numbers(list(chain.from_iterable(whole)))
    return None if items is None else (items, np.cumsum([0, *map(len, whole[:-1])]))


def _whole(iterator: Any, read: int) -> Sequence[Any] | None:
    """Return everything that an iterator yields from its beginning; None if not known.

    Args:
        iterator: of a list or a range, or a generator that yields from one of these.
        read: how much of it should have been read. If that is wrong, it is not the only one of its epoch.
    """
    while type(iterator) is GeneratorType:
        iterator = iterator.gi_yieldfrom
    kind: type = type(iterator)
    if kind is _LIST_ITERATOR:
        whole: list[Any] = next(iter(gc.get_referents(iterator)), [])
        return whole if len(whole) - iterator.__length_hint__() == read else None
    if kind is _RANGE_ITERATOR:
        of = iterator.__reduce__()[1][0]  # all of it, since Python 3.12 the rest
        end = read + iterator.__length_hint__()
        return range(end) if of.step == 1 and of.stop == end else None
    return None
