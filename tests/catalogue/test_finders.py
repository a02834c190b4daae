"""Containers and caches of functions count where they can be emptied and are filled."""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import lru_cache, wraps
from typing import Any

from memtriage.catalogue.entry import Place, PlaceFinder
from memtriage.catalogue.finders import (
    containers,
    lru_caches,
    lru_inside,
    only,
    read_places,
)
from memtriage.catalogue.scene import Scene
from support.holder_standins import NBYTES, Stage, tensor


def found(finder: PlaceFinder) -> list[Place]:
    with Scene([]) as scene:
        return list(finder(scene))


def told(finder: PlaceFinder) -> list[tuple[str, int | None]]:
    return [(place.path, place.entries) for place in found(finder)]


def test_containers_are_what_can_be_cleared_and_is_filled(stage: Stage) -> None:
    filled = {"dict": {1: 2}, "list": [1, 2], "deque": deque([1]), "ordered": OrderedDict(a=1, b=2, c=3)}
    others = {"empty": {}, "tuple": (1,), "text": "x"}
    stage.module("lib", **filled, **others)
    finder = containers("lib", *filled, *others)
    assert told(finder) == [("lib.dict", 1), ("lib.list", 2), ("lib.deque", 1), ("lib.ordered", 3)]
    for place, value in zip(found(finder), filled.values(), strict=True):
        assert place.clear is not None and list(place.values()) == [value]
        place.clear()
    assert [len(value) for value in filled.values()] == [0, 0, 0, 0]


def test_caches_of_functions_are_found_under_decorators_and_when_filled(stage: Stage) -> None:
    def make() -> Any:
        return lru_cache(maxsize=None)(lambda key: [key])

    plain, inner, empty = make(), make(), make()

    @wraps(inner)
    def once(key: int) -> Any:
        return inner(key)

    @wraps(once)
    def twice(key: int) -> Any:
        return once(key)

    stage.module("lib", plain=plain, decorated=twice, empty=empty, function=lambda key: key, number=3)
    finder = lru_caches("lib", "plain", "decorated", "empty", "function", "number")
    assert told(finder) == []
    plain(7), plain(8), twice(9)
    assert told(finder) == [("lib.plain", 2), ("lib.decorated", 1)]
    first, second = found(finder)
    assert [7] in first.values() and [9] in second.values()
    assert first.clear is not None
    first.clear()
    assert (plain.cache_info().currsize, inner.cache_info().currsize) == (0, 1)
    assert [lru_inside(function) for function in (plain, twice, make, 3, None)] == [
        plain,
        inner,
        None,
        None,
        None,
    ]


def test_a_reading_has_places_by_size_and_each_storage_once() -> None:
    shared, seen = tensor(), []
    reading = read_places(
        "x",
        [
            Place("small", only([shared[:1]]), entries=1),
            Place("large", only([shared, tensor(), tensor()]), entries=3),
            Place("other", other={"host": 5}),
        ],
        lambda facts, storage: seen.append(facts.nbytes),
    )
    assert reading.places == [("large", 2 * NBYTES), ("small", NBYTES), ("other", 5)]
    assert (reading.entries, reading.nbytes) == (4, {"cpu": 3 * NBYTES, "host": 5})
    assert [nbytes for _, _, nbytes in reading.storages] == seen == [NBYTES] * 3
