"""Containers that grow between walks: they name leaks of ordinary Python data and numpy arrays."""

from __future__ import annotations

import ctypes
import sys
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, islice, repeat
from operator import is_, lt
from typing import Any, Final, NamedTuple

from memtriage.observe.classes import addresses, bases_of, exactly, instance_dict, name_of, size_of
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import ARRAY, PLAIN, KindTable
from memtriage.observe.objects import array_base, array_bytes, tuple_items
from memtriage.process.stdlib import gc

_ORDERED: Final[tuple[Any, ...]] = (list, dict, tuple)
_UNORDERED: Final[tuple[Any, ...]] = (set, bytearray)
_BASES: Final = (*_ORDERED, deque, *_UNORDERED)
"""Types of containers whose growth is followed, as that of types derived from them. A tuple is followed
because a longer one may replace it."""
_BASES_BY_ID: Final = {id(base): base for base in _BASES}
_LONG_ENTRIES = 64
"""Entries of a container that is known again in a longer copy, of which it is the beginning."""
_ITEM_LIMIT = 2000
_ENDS = 256
"""Bytes of an array that are compared."""
_LONG = 64 * 1024
_MOST_ARRAYS = 20
_UNIT = 16
_ATOMS = (str, bytes, bytearray, int, float, complex)
_EXACT_ATOMS = addresses(*_ATOMS)
_UNSHARED_REFERENCES = 6
"""References to an entry's own atom: from the entry, the walk's graph or queue, and the counting itself."""


@dataclass(frozen=True, slots=True)
class GrownContainer:
    """A container with more entries than before.

    Attributes:
        position: its place in the later walk's graph.
        more: additional entries since the earlier walk.
        entry_bytes: size of a recent entry with what only it seems to hold, without tensors, and its place in
            the container.
        native: type of a recent entry that is an object of a C++ library, whose memory only it knows.
        kind: its type's name.
    """

    position: int
    more: int
    entry_bytes: int
    native: str | None
    kind: str


@dataclass(frozen=True, slots=True)
class LongArray:
    """A numpy array that owns its memory.

    Attributes:
        position: its place in the walk's graph.
        nbytes: size of its memory.
        head, tail: first and last bytes of it.
    """

    position: int
    nbytes: int
    head: bytes
    tail: bytes


@dataclass(frozen=True, slots=True)
class _Cache:
    """A container of a library that stops growing.

    Attributes:
        module: the library's module; it may not be loaded.
        path: names of the attributes that lead to the container.
        bound: the name of the module's variable with the number of entries at which it stops, or a function
            that returns it.
    """

    module: str
    path: tuple[str, ...]
    bound: str | Callable[[], int | None]


def _loaded_modules() -> int:
    return len(sys.modules)


def _compiled_versions() -> int | None:
    """Versions of one function that `torch.compile` keeps."""
    config = sys.modules.get("torch._dynamo.config")
    limit = getattr(
        config, "accumulated_recompile_limit", getattr(config, "accumulated_cache_size_limit", None)
    )
    return limit if isinstance(limit, int) else None


_CACHES: Final = (
    _Cache("re", ("_cache",), "_MAXCACHE"),
    _Cache("re", ("_cache2",), "_MAXCACHE2"),
    _Cache("linecache", ("cache",), _loaded_modules),  # an entry for each source file
    _Cache("typing", ("_cleanups",), _loaded_modules),  # one for each decorated function of typing
    _Cache("torch._inductor.codecache", ("PyCodeCache", "modules"), _compiled_versions),
    _Cache("torch._inductor.codecache", ("PyCodeCache", "modules_no_attr"), _compiled_versions),
    _Cache("torch._inductor.codecache", ("PyCodeCache", "linemaps"), _compiled_versions),
    _Cache("torch._dynamo.utils", ("guard_failures",), _compiled_versions),
    _Cache("torch._dynamo.utils", ("graph_break_reasons",), _compiled_versions),
    _Cache("torch._dynamo.eval_frame", ("cached_backends",), _compiled_versions),
)
_LBFGS_LISTS: Final = ("old_dirs", "old_stps", "ro")
"""What LBFGS keeps of the last `history_size` iterations."""


def known_bounds(optimizers: Iterable[Any]) -> dict[int, int]:
    """Bounds of the live containers of the standard library and of torch, by the containers' id.

    Args:
        optimizers: the program's.
    """
    bounds: dict[int, int] = {}
    for cache in _CACHES:
        module = sys.modules.get(cache.module)
        container = module
        for name in cache.path:
            container = getattr(container, name, None)
        bound = getattr(module, cache.bound, None) if isinstance(cache.bound, str) else cache.bound()
        if container is not None and isinstance(bound, int):
            bounds[id(container)] = bound
    for optimizer in optimizers:
        if any(name_of(base) == "LBFGS" for base in bases_of(type(optimizer))):
            bounds.update(_bounds_of_lbfgs(instance_dict(optimizer) or {}))
    return bounds


def _bounds_of_lbfgs(optimizer: dict[str, Any]) -> Iterator[tuple[int, int]]:
    groups, states = optimizer.get("param_groups"), optimizer.get("state")
    if type(groups) is not list:
        return
    sizes = [group.get("history_size") for group in groups if type(group) is dict]
    if not sizes or type(sizes[0]) is not int or states is None or not issubclass(type(states), dict):
        return
    for state in dict.values(states):
        for name in _LBFGS_LISTS:
            kept = state.get(name) if type(state) is dict else None
            if kept is not None:
                yield id(kept), sizes[0]


def bound_of(container: Any, known: Mapping[int, int]) -> tuple[int | None, int | None]:
    """(entries at which a container stops growing, entries now); None if there is no bound.

    If a container already has more entries, the bound does not hold.

    Args:
        container: any object.
        known: bounds of libraries' containers (`known_bounds`).
    """
    if type(container) is _LRU:
        state = container.cache_info()
        return state.maxsize, state.currsize
    entries = None if base_of(type(container)) is None else length_of(container)
    if issubclass(type(container), deque):
        return _read_maxlen(container), entries
    bound = known.get(id(container))
    return (bound if bound is not None and (entries or 0) <= bound else None), entries


_LRU: Final = type(lru_cache(lambda: None))
_read_maxlen = vars(deque)["maxlen"].__get__


def base_of(kind: type) -> Any:
    """Return the built-in type that a type of containers is, or is derived from; None for other types.

    Its methods call none that a derived class defines.
    """
    return next((base for each in bases_of(kind) if (base := _BASES_BY_ID.get(id(each)))), None)


def length_of(container: Any) -> int:
    """Return how many entries a container has, by its built-in type."""
    length: int = base_of(type(container)).__len__(container)
    return length


def containers_among(objects: Sequence[Any]) -> dict[Any, list[Any]]:
    """Return the containers among some objects that are not empty, by the built-in types of theirs.

    Short tuples are left out.
    """
    types = list(map(id, map(type, objects)))
    found: dict[Any, list[Any]] = {base: [] for base in _BASES}
    bases = {key: base_of(kind) for key, kind in dict(zip(types, map(type, objects), strict=True)).items()}
    add = {key: found[base].append for key, base in bases.items() if base is not None}
    for obj in compress(objects, map(add.__contains__, types)):
        add[id(type(obj))](obj)
    return {
        base: _with(_LONG_ENTRIES if base is tuple else 1, base, containers)
        for base, containers in found.items()
    }


def _with(entries: int, base: Any, containers: Sequence[Any]) -> list[Any]:
    """Return the containers that have at least so many entries."""
    return list(compress(containers, map(entries.__le__, map(base.__len__, containers))))


class KnownLengths(NamedTuple):
    """Containers of an earlier walk, by address: number of entries, and id of what tells it from others."""

    lengths: dict[int, int]
    firsts: dict[int, int]

    def of(self, address: int) -> tuple[int, int] | None:
        """Return both; None if there was no such container."""
        length = self.lengths.get(address)
        return None if length is None else (length, self.firsts[address])


class ContainerLengths:
    """The length and the first entry of each growable container at a walk. Keeps none alive.

    The first entry distinguishes an old container from a new one at the same address (-1 for kinds without a
    usable first entry). A queue loses its first entries: it has a weak reference instead. Empty containers
    are left out. It takes 24 bytes per container, because a program may have a hundred thousand, and it is
    kept from one census to the next.
    """

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._addresses, self._lengths, self._firsts = array("q"), array("q"), array("q")
        self._queues: list[weakref.ref[Any]] = []
        self._long: dict[tuple[int, int, int], int] = {}
        self.add(objects)

    def add(self, objects: Iterable[Any]) -> dict[Any, list[Any]]:
        """Note the lengths of the containers among some objects; return these as `containers_among` does."""
        found = containers_among(list(objects))
        for base, containers in found.items():
            self._addresses.extend(map(id, containers))
            self._lengths.extend(map(base.__len__, containers))
            if base is deque:
                known = list(map(weakref.ref, containers))  # for a queue the same one, as long as it is kept
                self._queues += known
                self._firsts.extend(map(id, known))
            elif base in _UNORDERED:
                self._firsts.extend(repeat(-1, len(containers)))
            else:
                self._firsts.extend(map(id, _nth(base, containers, 0)))
                self._note_long(base, containers)
        return found

    def _note_long(self, base: Any, containers: Sequence[Any]) -> None:
        long = _with(_LONG_ENTRIES, base, containers)
        parts = (map(type, long), _nth(base, long, 0), _nth(base, long, _LONG_ENTRIES - 1))
        keys = zip(*(map(id, part) for part in parts), strict=True)
        for address, key in zip(map(id, long), keys, strict=True):
            self._long[key] = -1 if key in self._long else address

    def by_address(self) -> KnownLengths:
        """Return them by the containers' addresses."""
        lengths = dict(zip(self._addresses, self._lengths, strict=True))
        return KnownLengths(lengths, dict(zip(self._addresses, self._firsts, strict=True)))

    def copies_of(self, earlier: ContainerLengths) -> Iterator[tuple[int, int]]:
        """Yield the addresses of long containers that begin as those that they replaced, and of these.

        They have the same entries at the beginning, and no other container has.
        """
        for key, address in self._long.items():
            before = earlier._long.get(key, -1)
            if -1 not in (before, address) and before != address:
                yield address, before


def _nth(base: Any, containers: Iterable[Any], at: int) -> Iterator[Any]:
    """Yield an entry of each container; None where another thread has removed it.

    Of a dict that is its first key, or a later value: keys may be numbers that many dicts have.

    In C, container by container, so that no other thread runs while one is read.
    """
    entries = map(dict.values, containers) if base is dict and at else map(base.__iter__, containers)
    return map(next, map(islice, entries, repeat(at), repeat(None)), repeat(None))


def _first_of(container: Any) -> int:
    """Return the id of a container's first entry, or of a queue's weak reference; -1 for other kinds."""
    base = base_of(type(container))
    if base is deque:
        return id(weakref.ref(container))
    return -1 if base in _UNORDERED else id(next(base.__iter__(container), None))


def grown_among(containers: Mapping[Any, Sequence[Any]], earlier: KnownLengths) -> list[Any]:
    """Return the containers that existed before and have more entries now, in order.

    Args:
        containers: as `containers_among` returns them.
        earlier: lengths and first entries at an earlier walk (`ContainerLengths.by_address`).
    """
    grown: list[Any] = []
    for base, of_base in containers.items():
        known = map(earlier.lengths.get, map(id, of_base), repeat(sys.maxsize))
        longer = compress(of_base, map(lt, known, map(base.__len__, of_base)))
        grown += (obj for obj in longer if earlier.firsts[id(obj)] == _first_of(obj))
    return grown


def most_grown(containers: Mapping[Any, Sequence[Any]], earlier: KnownLengths, most: int = 32) -> list[Any]:
    """Return the `most` containers of `grown_among` that got most entries."""
    grown = grown_among(containers, earlier)
    return sorted(grown, key=lambda obj: earlier.lengths[id(obj)] - length_of(obj))[:most]


def grown_containers(graph: HeapGraph, earlier: KnownLengths, most: int = 256) -> list[GrownContainer]:
    """Containers that existed before and have more entries now, by additional bytes.

    Those with a bound are left out.

    Args:
        graph: of the later walk.
        earlier: lengths and first entries at the earlier walk (`ContainerLengths.by_address`).
        most: how many to return at most, those with most additional entries.
    """
    if not earlier.lengths:
        return []
    containers = []
    # From `first_own` on there are memtriage's own objects, and what no variable of the program leads to.
    objects = [*graph.objects[: graph.first_own], *_of_running_loops(graph)]
    grown = grown_among(containers_among(objects), earlier)
    bounds = known_bounds(graph.objects[position] for position in graph.optimizers)
    unbounded = [obj for obj in grown if bound_of(obj, bounds)[0] is None]
    unbounded.sort(key=lambda obj: earlier.lengths[id(obj)] - length_of(obj))
    for obj in unbounded[:most]:
        position = graph.index[id(obj)]
        more = length_of(obj) - earlier.lengths[id(obj)]
        entry_bytes, native = recent_entries(graph.kinds, obj)
        containers.append(GrownContainer(position, more, entry_bytes, native, name_of(type(obj))))
    containers.sort(key=lambda grown: -grown.more * grown.entry_bytes)
    return containers


def alike(graph: HeapGraph, position: int, most: int = 8192) -> tuple[list[int], int]:
    """Return the program's containers of the type of one, that objects of the same class have, and a factor.

    If there are more than `most`, they are a part of all, the same ones at each walk; the factor is how many
    times as many there are.
    """
    kind, holder = type(graph.objects[position]), _holding_class(graph, position)
    own = list(islice(graph.objects, graph.first_own))
    of_kind = compress(range(len(own)), map(is_, map(type, own), repeat(kind)))
    found, factor = [each for each in of_kind if _holding_class(graph, each) is holder], 1
    while len(found) > most:
        factor *= 2
        found = [each for each in found if id(own[each]) // 64 % factor == 0]
    return found, factor


def _holding_class(graph: HeapGraph, position: int) -> type | None:
    """Return the class of the object that has a container, directly or in other containers; None for none."""
    while (position := graph.parents[position]) >= 0:
        kind = type(graph.objects[position])
        if base_of(kind) is None:
            return kind
    return None


def _of_running_loops(graph: HeapGraph) -> Iterator[Any]:
    """Yield what only the iterator of a running `for` leads to, such as a loader's data set."""
    in_loop = False
    for position in range(graph.first_unrooted, graph.first_garbage):
        obj = graph.objects[position]
        if graph.parents[position] < 0:
            in_loop = any("__next__" in vars(klass) for klass in type(obj).__mro__)
        if in_loop:
            yield obj


def long_arrays(graph: HeapGraph) -> list[LongArray]:
    """The largest of the program's arrays of numbers, largest first.

    An array does not grow, but a program may replace it by a longer one, as with `numpy.concatenate`.

    Args:
        graph: of a walk.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    own = [position for position in graph.arrays if position < graph.first_own]
    long = [
        (obj.nbytes, position, obj)
        for position in own
        if type(obj := graph.objects[position]) is numpy.ndarray
        and obj.flags.owndata
        and obj.nbytes >= _LONG
        and not obj.dtype.hasobject
    ]
    arrays = []
    for nbytes, position, obj in sorted(long, key=lambda each: -each[0])[:_MOST_ARRAYS]:
        address = obj.__array_interface__["data"][0]
        head, tail = (ctypes.string_at(at, _ENDS) for at in (address, address + nbytes - _ENDS))
        arrays.append(LongArray(position, nbytes, head, tail))
    return arrays


def recent_entries(kinds: KindTable, container: Any) -> tuple[int, str | None]:
    """Return what `GrownContainer` says of a growable container's recent entries: their size and type."""
    newest = _newest(container)
    native = next((name for item in newest if (name := _native_type(item)) is not None), None)
    place = size_of(container) // max(1, length_of(container))
    return place + _added_by_each(kinds, container, newest), native


def _newest(container: Any) -> list[Any]:
    """Up to four of the newest entries, by the container's order if it has one."""
    base = base_of(type(container))
    if base is dict:
        return list(islice(reversed(dict.items(container)), 4))
    if base is set:
        return list(islice(set.__iter__(container), 4))
    if base is bytearray:
        return []
    length = length_of(container)  # a negative index would ask a derived class for it
    return [base.__getitem__(container, at) for at in range(length - 1, max(-1, length - 5), -1)]


def _added_by_each(kinds: KindTable, container: Any, newest: Sequence[Any]) -> int:
    """Average bytes that an entry adds to earlier ones; `newest` is the result of `_newest`.

    What entries share, such as the event loop of futures or the manager of loggers, came with an earlier one.
    It counts for the oldest of these entries, which is left out unless it is the only one.
    """
    seen = {id(container)}
    pairs = base_of(type(container)) is dict  # which were only made for this
    sizes = [
        deep_size(kinds, entry, seen) - (_allocated(entry) if pairs else 0) for entry in reversed(newest)
    ]
    added = sizes[1:] or sizes
    return sum(added) // max(1, len(added))


def _allocated(obj: Any) -> int:
    """Return the bytes that Python's allocator, or malloc, takes for an object: a multiple of 16."""
    return -(-size_of(obj) // _UNIT) * _UNIT


def own_bytes(graph: HeapGraph, obj: Any) -> int | None:
    """Return the bytes of plain data with the texts and numbers that only it has, which no graph lists.

    Without the objects below it, and without memory of an array that one of these has. None for what
    `deep_size` leaves out.
    """
    kind = graph.kinds[type(obj)]
    if kind == ARRAY:
        base = array_base(obj)
        return array_bytes(obj) if base is None else atom_bytes((base,))  # unpickled: of a `bytes`
    if kind != PLAIN or exactly(obj, types.FunctionType, types.FrameType):
        return None
    return _allocated(obj) + atom_bytes(gc.get_referents(obj))


def atom_bytes(objects: Sequence[Any]) -> int:
    """Return the bytes of the texts and numbers among some objects that nobody else seems to have."""
    exact = [obj for obj in objects if id(type(obj)) in _EXACT_ATOMS]  # there may be millions
    measured = zip(map(sys.getsizeof, exact), map(sys.getrefcount, exact), strict=True)
    nbytes = sum(-(-size // _UNIT) * _UNIT for size, count in measured if count <= _UNSHARED_REFERENCES)
    if len(exact) == len(objects):
        return nbytes
    return nbytes + sum(
        _allocated(obj)
        for obj in objects
        if id(type(obj)) not in _EXACT_ATOMS
        and issubclass(type(obj), _ATOMS)
        and sys.getrefcount(obj) <= _UNSHARED_REFERENCES
    )


def _native_type(entry: Any) -> str | None:
    """Name of the C++ type (bound by pybind11) of an entry, or of a part of it."""
    for part in tuple_items(entry) if issubclass(type(entry), tuple) else (entry,):
        if any(name_of(type(base)) == "pybind11_type" for base in bases_of(type(part))):
            return name_of(type(part))
    return None


def deep_size(kinds: KindTable, obj: Any, seen: set[int] | None = None) -> int:
    """Bytes of an object and of the plain data and arrays below it, up to a number of objects.

    Tensors, modules, classes and functions are left out: they are accounted for elsewhere or shared.

    Args:
        kinds: of types.
        obj: any object.
        seen: ids of objects to leave out; all that were met are added.
    """
    seen = set() if seen is None else seen
    most = len(seen) + _ITEM_LIMIT
    queue = [obj]
    total = 0
    for part in queue:
        if id(part) in seen:
            continue
        seen.add(id(part))
        if len(seen) > most:
            continue
        kind = kinds[type(part)]
        if kind == ARRAY:
            base = array_base(part)
            if base is None:
                total += array_bytes(part)
            else:
                queue.append(base)
        elif issubclass(type(part), _ATOMS):
            # Small numbers and interned words are shared by everybody. The given object itself always counts.
            if part is obj or sys.getrefcount(part) <= _UNSHARED_REFERENCES:
                total += _allocated(part)
        elif kind == PLAIN and not exactly(part, types.FunctionType, types.FrameType):
            total += _allocated(part)
            queue.extend(gc.get_referents(part))
    return total
