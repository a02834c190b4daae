"""The objects that the collector tracks."""

from __future__ import annotations

import weakref

from memtriage.observe.objects import instances, tracked_objects


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
