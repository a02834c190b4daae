"""The objects that the collector tracks."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from memtriage.observe.objects import Listing, instances, not_among, tracked_objects, tuple_items


class Batch:
    pass


class Validation(Batch):
    pass


class Unhashable(type):
    __hash__ = None  # type: ignore[assignment]


class Odd(metaclass=Unhashable):
    pass


def test_tracked_objects_has_containers_and_no_texts() -> None:
    batch, text = Batch(), "a text that nobody else has"
    listed = set(map(id, tracked_objects()))
    assert id(batch) in listed
    assert id(text) not in listed


def test_instances_yields_objects_of_the_wanted_types() -> None:
    batch, validation = Batch(), Validation()
    assert list(instances(lambda kind: kind is Batch)) == [batch]
    assert set(instances(lambda kind: issubclass(kind, Batch))) == {batch, validation}


def test_instances_asks_once_per_type() -> None:
    batches = [Batch(), Batch(), Odd()]
    asked: list[type] = []
    list(instances(lambda kind: bool(asked.append(kind))))
    assert sum(kind is Batch for kind in asked) == 1
    assert sum(kind is Odd for kind in asked) == 1
    assert len(batches) == 3


def test_instances_never_asks_an_object() -> None:
    batch = Batch()
    dead = weakref.proxy(batch)
    del batch
    assert list(instances(lambda kind: issubclass(kind, Batch))) == []
    assert type(dead) is weakref.ProxyType


def test_instances_keeps_nothing_alive_after_the_iteration() -> None:
    batch = Batch()
    alive = weakref.ref(batch)
    list(instances(lambda kind: kind is Batch))
    del batch
    assert alive() is None


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="tuple() makes the tuple when it has all items")
def test_items_of_a_tuple_that_is_still_being_built() -> None:
    seen: list[list[object]] = []

    def batches() -> Iterator[Batch]:
        batch = Batch()
        yield batch
        (unfinished,) = (each for each in gc.get_referrers(batch) if type(each) is tuple)
        seen.append(tuple_items(unfinished))
        del unfinished  # or it could not be shortened to its length
        yield batch

    built = tuple(batches())
    assert seen == [[built[0]]]
    assert tuple_items(built) == [built[0], built[0]]


def test_items_of_a_tuple_in_order_whatever_its_class_says() -> None:
    class Backwards(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            return iter(self[::-1])

    assert tuple_items((1, 2, 2)) == [1, 2, 2]
    assert tuple_items(Backwards((1, 2))) == [1, 2]
    assert tuple_items(()) == []


def test_listing_answers_by_id_and_type() -> None:
    class Compared(type):
        def __hash__(cls) -> int:
            raise AssertionError("a class was hashed by code of its own")

    class Odd(metaclass=Compared):
        pass

    first, second, odd = [1], {"two": 2}, Odd()
    listing = Listing([first, second, odd])
    assert listing.by_type == {id(list): [first], id(dict): [second], id(Odd): [odd]}
    assert list(listing.of_types({id(list), id(Odd)})) == [first, odd]
    assert list(listing.among({id(odd), id(second)})) == [second, odd]
    assert list(not_among(listing.objects, {id(second)})) == [first, odd]
    before = sys.getrefcount(odd)
    listing.clear()
    assert sys.getrefcount(odd) < before
    assert not list(listing.of_types({id(list)}))
