"""Classes of an earlier reading are taken over, unless they have changed."""

from __future__ import annotations

import builtins
import functools
import gc
import os
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from memtriage.outside.memory import ProcessMemory
from memtriage.outside.objects import RemoteHeap, RemoteType
from memtriage.outside.own_memory import own_words
from memtriage.outside.python_layout import layout_of
from support.certain import certain

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)


class _Kept:
    __slots__ = ("value",)


class _Renamed:
    pass


def _read(before: RemoteHeap | None = None) -> RemoteHeap:
    layout = certain(layout_of(sys.version_info[:2]))
    return RemoteHeap(ProcessMemory(os.getpid()), layout, lambda address: address, before)


def test_a_generator_that_runs_has_its_variables() -> None:
    found: list[int] = []

    def running() -> Generator[list[int], None, None]:
        kept = [id(None)]
        sorted([made], key=lambda it: found.extend(_read().referents(id(it))) or 0)  # it waits for C
        yield kept

    made = running()
    assert id(next(made)) in found


def test_only_a_class_that_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _read()
    for klass in (_Kept, _Renamed):
        known = first.class_at(id(klass))
        assert known is not None and known.name == klass.__name__
    _Renamed.__name__ = "Other"
    kept = _Kept()
    kept.value = [1]
    second = _read(first)
    read = []
    monkeypatch.setattr(second, "_read_class", lambda address: read.append(address))
    second.class_at(id(_Kept))
    second.class_at(id(_Renamed))
    assert id(_Renamed) in read
    assert id(_Kept) not in read
    third = _read(first)
    renamed, same = third.class_at(id(_Renamed)), third.class_at(id(_Kept))
    assert renamed is not None and renamed.name == "Other"
    assert same is not None and same.name == "_Kept"
    assert id(kept.value) in third.referents(id(kept))  # read in the new memory


# --- what each kind of object refers to, compared with the collector of this Python -------------------------


class _Attributes:
    def __init__(self) -> None:
        self.first, self.second = [1], {"a": [2]}

    def method(self) -> None:
        pass


class _WithDict(_Attributes):
    def __init__(self) -> None:
        super().__init__()
        self.own = vars(self)


class _Slots:
    __slots__ = ("__dict__", "__weakref__", "one", "two")

    def __init__(self) -> None:
        self.one, self.two, self.three = [1], None, {4}


class _Items(list[object]):
    pass


class _Table(dict[str, object]):
    pass


class _Point(NamedTuple):
    x: object
    y: object


def _closure(default: object = ["default"], *, named: object = ("named",)) -> Callable[[], object]:
    kept: list[object] = []
    return lambda: [kept, default, named]


def _generator() -> Generator[object, None, None]:
    kept = ["kept"]
    yield kept


def _suspended() -> Generator[object, None, None]:
    generator = _generator()
    next(generator)
    return generator


def _ended() -> Iterator[object]:
    generator = _generator()
    assert len(list(generator)) == 1
    return generator


def _traceback() -> types.TracebackType:
    kept = ["kept"]
    try:
        raise ValueError(kept)
    except ValueError as error:
        assert error.__traceback__ is not None
        return error.__traceback__


def _cache(bound: int | None) -> Callable[[int], list[int]]:
    cached = functools.lru_cache(bound)(lambda value: [value])
    for value in range(300, 305):
        cached(value)
    return cached


def _with_attributes(made: Any) -> Any:
    made.extra = ["extra"]
    return made


def _weak_dead() -> weakref.ref[Any]:
    return weakref.ref(_Attributes(), lambda dead: None)


_ALIVE, _WAITING = _Attributes(), _suspended()
OBJECTS: dict[str, object] = {
    "list": [[1], {}, "text", 5],
    "empty list": [],
    "tuple": ([1], (2, []), None),
    "dict of strings": {"a": [1], "b": (2, [])},
    "dict of anything": {(1, 2): [1], 5: [2], "text": [3]},
    "dict that shrank": {key: [key] for key in "abcdef"},
    "set": {(1,), (2, 3), "text"},
    "frozenset": frozenset([(1,), (2, 3)]),
    "deque": deque(([at] for at in range(200)), maxlen=150),
    "function": _closure(),
    "function with defaults": _closure,
    "cell": _closure().__closure__[0],  # type: ignore[index]
    "bound method": _ALIVE.method,
    "method of a builtin": [].append,
    "module": types,
    "class": _Slots,
    "class of C": dict,
    "suspended generator": _WAITING,
    "ended generator": _ended(),
    "traceback": _traceback(),
    "frame that ended": _traceback().tb_frame,
    "frame that a generator has": _WAITING.gi_frame,
    "weak reference": weakref.ref(_ALIVE, lambda dead: None),
    "dead weak reference": _weak_dead(),
    "bounded cache": _cache(3),
    "unbounded cache": _cache(None),
    "partial": functools.partial(_closure, [1], named=[2]),
    "instance": _ALIVE,
    "instance with a dict": _WithDict(),
    "instance with slots": _Slots(),
    "list with attributes": _with_attributes(_Items([[1], [2]])),
    "dict with attributes": _with_attributes(_Table(a=[1])),
    "named tuple": _Point([1], [2]),
    "exception": ValueError(["why"]),
    "property": property(_closure),
}
del OBJECTS["dict that shrank"]["b"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OBJECTS)
def test_references_are_those_that_the_collector_sees(name: str) -> None:
    obj = OBJECTS[name]
    followed = {id(each) for each in gc.get_objects() if not isinstance(each, type)} - {id(vars(builtins))}
    seen = [id(child) for child in gc.get_referents(obj)]
    found = [child for child in _read().referents(id(obj)) if child]
    assert Counter(child for child in found if child in followed) == Counter(
        child for child in seen if child in followed
    )
    if (
        isinstance(obj, (list, tuple, dict, set, frozenset, deque, _Attributes, _Slots))
        and name not in UNORDERED
    ):
        klass = id(type(obj))  # the collector sees that of a deque since 3.12
        assert [child for child in found if child != klass] == [child for child in seen if child != klass]


UNORDERED = ("dict of anything",)
"""The collector sees all keys of such a dict's entries after their values."""


def test_a_ring_of_a_cache_that_was_copied_while_it_changed_ends() -> None:
    cached, heap = _cache(3), _read()
    following = heap.layout.lru_next
    links = [own_words(id(cached) + following, 1)[0]]
    for _ in range(2):
        links.append(own_words(links[-1] + following, 1)[0])
    memory = heap.memory
    memory.words(id(cached), 1), [memory.words(link, 1) for link in links]
    memory.put(np.array(links[-1:]) + following, np.array([links[:1]]))  # leads back past the cache itself
    found = Counter(heap.referents(id(cached)))
    keys = [own_words(link + heap.layout.lru_key, 1)[0] for link in links]
    assert [found[key] for key in keys] == [1, 1, 1]


def test_what_a_class_is_made_of() -> None:
    heap = _read()

    def known(klass: type) -> RemoteType:
        return certain(heap.class_at(id(klass)))

    slots, items, point = known(_Slots), known(_Items), known(_Point)
    assert (slots.name, slots.qualified_name, slots.module) == ("_Slots", "_Slots", __name__)
    assert slots.bases == (f"{__name__}._Slots", "builtins.object")
    assert slots.lineage == (id(_Slots), id(object))
    assert (slots.size, items.size) == (_Slots.__basicsize__, _Items.__basicsize__)
    assert (slots.own_from, items.own_from) == (16, list.__basicsize__)
    assert (point.item_size, point.shape, slots.shape) == (tuple.__itemsize__, id(tuple), 0)
    assert known(type(_Point)).is_class and not slots.is_class
    assert [heap.is_a(items, list), heap.is_a(items, dict), heap.is_a(items, dict, list)] == [
        True,
        False,
        True,
    ]
    assert [heap.is_exactly(items, list), heap.is_exactly(known(list), list)] == [False, True]
    assert heap.declares(slots, "one", "two", "__init__")
    assert not heap.declares(slots, "one", "three")
    assert (heap.built_in(id(list)), heap.built_in(id(_Items))) == (list, None)


def test_attributes_and_slots_of_instances() -> None:
    plain, slotted = _Attributes(), _Slots()
    several = (_ALIVE, _WithDict(), _with_attributes(_Items()), _with_attributes(_closure))
    heap = _read()

    def attributes(obj: object) -> dict[str, int]:
        klass = certain(heap.type_of(id(obj)))
        return dict(heap.attributes(id(obj), klass))

    for obj in several:
        wanted = {name: id(value) for name, value in object.__getattribute__(obj, "__dict__").items()}
        assert attributes(obj) == wanted
    assert attributes(slotted) == {"three": id(slotted.three)}
    klass, of_plain = heap.type_of(id(slotted)), heap.type_of(id(plain))
    assert klass is not None and of_plain is not None
    assert heap.slot_name(id(slotted), klass, id(slotted.one)) == "one"
    assert heap.slot_name(id(slotted), klass, id(plain)) is None
    assert heap.attribute(id(plain), of_plain, "second") == id(plain.second)
    assert heap.attribute(id(plain), of_plain, "third") == 0


@pytest.mark.parametrize(
    ("obj", "bound"),
    [
        (deque(maxlen=7), 7),
        (deque(), None),
        (deque(maxlen=0), 0),
        (_cache(3), 3),
        (_cache(None), None),
        ([1, 2], None),
    ],
)
def test_how_many_entries_a_container_takes(obj: object, bound: int | None) -> None:
    heap = _read()
    klass = certain(heap.type_of(id(obj)))
    assert heap.bound(id(obj), klass) == bound


def test_variables_of_a_suspended_generator_and_of_an_ended_function() -> None:
    generator, ended, traceback = _suspended(), _ended(), _traceback()
    local = generator.gi_frame.f_locals["kept"]
    heap = _read()
    frame = certain(heap.frame(heap.generator_frame(id(generator))))
    assert (frame.name, frame.file) == ("_generator", __file__)
    assert frame.variables == [("kept", id(local))]
    assert heap.generator_frame(id(ended)) == 0
    raised = certain(heap.frame(heap.memory.word(id(traceback.tb_frame) + heap.layout.frame_object_frame)))
    assert raised.name == "_traceback"
    assert dict(raised.variables)["kept"] == id(traceback.tb_frame.f_locals["kept"])
    assert heap.frame(0) is heap.frame(id(local)) is None


@pytest.mark.parametrize("offset", [0, 8, 1])
def test_what_is_no_object_has_no_class(offset: int) -> None:
    text = bytes(64)
    heap = _read()
    assert heap.class_at(id(text) + 32 + offset) is None
    assert heap.class_at(id(text)) is None
    assert heap.type_of(id(text) + 32) is None
    assert heap.referents(id(text) + 32) == []
