"""Entries are found by the names of variables and attributes, without running code of theirs."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, deque
from functools import lru_cache, wraps
from typing import Any

import pytest

from memtriage.catalogue.entry import PlaceFinder
from memtriage.catalogue.finders import (
    ValueSlot,
    attribute,
    container,
    containers,
    emptied,
    every_variable,
    is_filled,
    length,
    lru_caches,
    lru_inside,
    only,
    several,
    variables,
)
from memtriage.catalogue.place import Place
from memtriage.catalogue.scene import Scene
from support.holder_standins import Stage


def found(finder: PlaceFinder) -> list[Place]:
    with Scene([]) as scene:
        return list(finder(scene))


def told(finder: PlaceFinder) -> list[tuple[str, int | None]]:
    return [(place.path, place.entries) for place in found(finder)]


def test_a_slot_is_a_name_in_a_dict_or_on_a_class() -> None:
    class Klass:
        buffer: Any = 1

    for owner, read in (
        (Klass, lambda: Klass.buffer),
        (namespace := {"buffer": 1}, lambda: namespace["buffer"]),
    ):
        slot = ValueSlot(owner, "buffer")
        assert (slot.get(), slot.values()) == (1, (1,))
        slot.put(2)
        assert read() == 2
        slot.empty()
        assert read() is None
    del Klass.buffer, namespace["buffer"]
    assert [ValueSlot(owner, "buffer").get() for owner in (Klass, namespace)] == [None, None]


def test_variables_are_those_of_the_loaded_modules_of_a_package(stage: Stage) -> None:
    shared = [1]
    stage.module("lib.first", table=shared, other=[2], unset=None)
    stage.module("lib.second", table=shared)
    stage.module("library", table=[3])
    stage.patch.setitem(sys.modules, "lib.lazy", None)
    names = ("table", "unset", "other")
    assert [(path, value) for path, value, _ in every_variable("lib", *names)] == [
        ("lib.first.table", [1]),
        ("lib.first.other", [2]),
        ("lib.second.table", [1]),
    ]
    assert [path for path, _, _ in variables("lib", *names)] == ["lib.first.table", "lib.first.other"]
    for _, _, slot in every_variable("lib", "table"):
        slot.empty()
    assert [sys.modules[name].__dict__["table"] for name in ("lib.first", "lib.second", "library")] == [
        None,
        None,
        [3],
    ]


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


def test_variables_are_emptied_in_every_module_that_imports_them(stage: Stage) -> None:
    shared = object()
    modules = [stage.module(f"lib.{name}", workspace=shared, other=shared) for name in ("base", "importer")]
    places = found(emptied("lib", "workspace"))
    assert [(place.path, place.entries) for place in places] == [
        ("lib.base.workspace", None),
        ("lib.importer.workspace", None),
    ]
    assert [list(place.values()) for place in places] == [[shared], [shared]]
    for place in places:
        assert place.clear is not None
        place.clear()
    assert [module.__dict__["workspace"] for module in modules] == [None, None]
    assert [list(place.values()) for place in places] == [[None], [None]]
    assert modules[0].__dict__["other"] is shared


def test_what_several_finders_find_is_in_their_order(stage: Stage) -> None:
    stage.module("lib", table={1: 2}, workspace=object())
    assert told(several(emptied("lib", "workspace"), containers("lib", "table"))) == [
        ("lib.workspace", None),
        ("lib.table", 1),
    ]


def test_an_attribute_is_the_object_s_own_and_no_code_of_its_class() -> None:
    class Owner:
        of_class = 1

        def __init__(self) -> None:
            self.own = 2

        @property
        def computed(self) -> int:
            raise AssertionError("a property ran")

        def __getattr__(self, name: str) -> int:
            raise AssertionError("__getattr__ ran")

    names = ("own", "of_class", "computed", "none")
    assert [attribute(Owner(), name) for name in names] == [2, None, None, None]
    assert attribute(None, "own") is None


@pytest.mark.parametrize(
    ("value", "entries", "filled"),
    [
        (None, None, False),
        ({}, 0, False),
        ([], 0, False),
        ((), 0, False),
        (set(), 0, False),
        ({1: 2}, 1, True),
        ([1, 2], 2, True),
        ((1,), 1, True),
        ({1}, 1, True),
        (0, None, True),
        ("text", None, True),
        (types.SimpleNamespace(), None, True),
    ],
)
def test_what_counts_as_filled(value: Any, entries: int | None, filled: bool) -> None:
    assert (length(value), is_filled(value)) == (entries, filled)


def test_a_place_of_one_container() -> None:
    value = {1: 2, 3: 4}
    place = container("lib.table", value)
    assert (place.path, place.entries, only(value)(), place.other) == ("lib.table", 2, (value,), {})
