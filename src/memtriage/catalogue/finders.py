"""Ways in which entries of the catalogue are found, by what is loaded and by attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from memtriage.catalogue.contents import LRU, cached_values, storages_in
from memtriage.catalogue.entry import Place, PlaceFinder
from memtriage.catalogue.scene import Scene
from memtriage.model.holders import HolderReading
from memtriage.observe.classes import attributes_of, instance_dict, variables_of
from memtriage.observe.tensors import StorageFacts, undisturbed


class ValueSlot:
    """Where a value stands: a name in a dict, or on a class. Keeps these alive, but not the value."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name

    def get(self) -> Any:
        """The value that stands there now; None where it was deleted."""
        if isinstance(self._owner, dict):
            return self._owner.get(self._name)
        return attributes_of(self._owner).get(self._name)

    def put(self, value: Any) -> None:
        """Put another in its place."""
        if isinstance(self._owner, dict):
            self._owner[self._name] = value
        else:
            setattr(self._owner, self._name, value)

    def values(self) -> tuple[Any]:
        """The value, as a place gives what is to be looked into."""
        return (self.get(),)

    def empty(self) -> None:
        """Put None in its place."""
        self.put(None)


def every_variable(package: str, *names: str) -> Iterator[tuple[str, Any, ValueSlot]]:
    """(path, value, slot) of the variables of these names in the loaded modules of a package, but None."""
    for name, module in Scene.loaded(package):
        namespace = variables_of(module)
        for variable in names:
            value = namespace.get(variable)
            if value is not None:
                yield f"{name}.{variable}", value, ValueSlot(namespace, variable)


def variables(package: str, *names: str) -> Iterator[tuple[str, Any, ValueSlot]]:
    """The same, each value once: what other modules imported too comes from the one that was loaded first."""
    seen: set[int] = set()
    for path, value, slot in every_variable(package, *names):
        if id(value) not in seen:
            seen.add(id(value))
            yield path, value, slot


def containers(package: str, *names: str) -> PlaceFinder:
    """Dicts, lists and the like in variables of modules: `clear()` empties them."""

    def find(scene: Scene) -> Iterator[Place]:
        for path, value, _ in variables(package, *names):
            if hasattr(type(value), "clear") and len(value):
                yield container(path, value)

    return find


def only(value: Any) -> Callable[[], tuple[Any]]:
    """A place's `values`: this object, which the place keeps alive."""
    return lambda: (value,)


def container(path: str, value: Any) -> Place:
    """A place that is a container with a `clear`."""
    return Place(path, only(value), value.clear, entries=len(value))


def lru_caches(package: str, *names: str) -> PlaceFinder:
    """Functions under `functools.lru_cache` in variables of modules."""

    def find(scene: Scene) -> Iterator[Place]:
        for path, value, _ in variables(package, *names):
            wrapper = lru_inside(value)
            if wrapper is not None and wrapper.cache_info().currsize:
                yield lru_cache(path, wrapper)

    return find


def lru_inside(function: Any) -> Any:
    """The `lru_cache` under the decorators of a function; None without one."""
    while type(function) is FunctionType:
        function = (instance_dict(function) or {}).get("__wrapped__")
    return function if type(function) is LRU else None


def lru_cache(path: str, wrapper: Any) -> Place:
    """A place that is a function under `functools.lru_cache`."""
    return Place(
        path, lambda: cached_values(wrapper), wrapper.cache_clear, entries=wrapper.cache_info().currsize
    )


def emptied(package: str, *names: str) -> PlaceFinder:
    """Variables of modules that are cleared by putting None in their place."""

    def find(scene: Scene) -> Iterator[Place]:
        for path, _, slot in every_variable(package, *names):
            yield Place(path, slot.values, slot.empty)

    return find


def several(*finders: PlaceFinder) -> PlaceFinder:
    """What any of several finders finds."""

    def find(scene: Scene) -> Iterator[Place]:
        for finder in finders:
            yield from finder(scene)

    return find


def attribute(owner: Any, name: str) -> Any:
    """An object's own attribute, read without running code of its class; None where there is none."""
    return (instance_dict(owner) or {}).get(name)


def is_filled(value: Any) -> bool:
    """Whether a variable has anything but None or an empty container."""
    return value is not None and length(value) != 0


def length(value: Any) -> int | None:
    """Entries of a plain container; None for anything else."""
    return len(value) if issubclass(type(value), (dict, list, tuple, set)) else None


def read_places(
    name: str, places: Iterable[Place], watch: Callable[[StorageFacts, Any], None] | None = None
) -> HolderReading:
    """What the places of an entry hold now. A storage in several places counts for the first."""
    reading = HolderReading(name=name)
    seen: set[tuple[str, int]] = set()
    sizes: list[tuple[str, int]] = []
    with undisturbed():
        for place in places:
            held = sum(place.other.values())
            for device, nbytes in place.other.items():
                reading.nbytes[device] = reading.nbytes.get(device, 0) + nbytes
            for facts, storage in storages_in(place.values()):
                if (facts.device, facts.address) in seen:
                    continue
                seen.add((facts.device, facts.address))
                held += facts.nbytes
                reading.nbytes[facts.device] = reading.nbytes.get(facts.device, 0) + facts.nbytes
                reading.storages.append((facts.device, facts.address, facts.nbytes))
                if watch is not None:
                    watch(facts, storage)
            sizes.append((place.path, held))
            if place.entries is not None:
                reading.entries = (reading.entries or 0) + place.entries
    reading.places = sorted(sizes, key=lambda pair: -pair[1])
    return reading
