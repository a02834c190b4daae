"""Find the storages inside any value: containers, tensors and their subclasses, plain objects."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

from memtriage.observe.classes import (
    attributes_of,
    bases_of,
    exactly,
    instance_dict,
    module_of,
    name_of,
    read_member,
)
from memtriage.observe.edges import is_sparse, sparse_parts
from memtriage.observe.objects import tuple_items
from memtriage.observe.tensors import StorageFacts, plain, storage_facts
from memtriage.process.stdlib import gc

LRU: Final = type(functools.lru_cache(lambda: None))

_DEPTH: Final = 6
_MOST_OBJECTS: Final = 200_000
_CLOSED: Final = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.FrameType,
    types.CodeType, str, bytes, bytearray, int, float, complex, type(None),
)  # fmt: skip
"""Types that are not looked into: they hold the program, not an entry's values."""


def class_of(module: str, name: str) -> type | tuple[()]:
    """A class of a module that may not be loaded; `()` then, of which nothing is a subclass."""
    klass = getattr(sys.modules.get(module), name, ())
    return klass if issubclass(type(klass), type) else ()


def tensors_in(values: Iterable[Any], depth: int = _DEPTH) -> Iterator[Any]:
    """Tensors inside values, those that make up a subclass included; each object is looked at once.

    Modules, functions and classes are not entered: what hangs on them is not the value's. Keys of dicts are
    left out but for those of an `lru_cache`.
    """
    tensor, module = class_of("torch", "Tensor"), class_of("torch.nn", "Module")
    seen: set[int] = set()
    level = list(values)
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or issubclass(type(value), _CLOSED) or len(seen) > _MOST_OBJECTS:
                continue
            seen.add(id(value))
            if issubclass(type(value), tensor):
                yield value
                below += _parts_of_tensor(value)
            elif not issubclass(type(value), module):
                below += _parts(value)
        level = below


def _parts_of_tensor(tensor: Any) -> list[Any]:
    own = instance_dict(tensor)
    parts = list(own.values()) if own else []
    try:
        return parts + sparse_parts(tensor) if is_sparse(tensor) else parts
    except (RuntimeError, AttributeError):  # functorch wrappers have no layout
        return parts


def _parts(value: Any) -> list[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))
    if kind is tuple:
        return tuple_items(value)
    if issubclass(kind, (list, tuple, set, frozenset, deque)):
        return (
            list(kind.__iter__(value))
            if exactly(value, list, set, frozenset, deque)
            else gc.get_referents(value)
        )
    if kind is LRU:
        return cached_values(value)
    own = instance_dict(value)
    return (list(own.values()) if own else []) + _slots(value)


def _slots(value: Any) -> list[Any]:
    kind = type(value)
    if module_of(kind) in ("builtins", "threading", "_thread"):
        return []
    members = (
        member
        for base in bases_of(kind)
        for member in attributes_of(base).values()
        if type(member) is types.MemberDescriptorType
    )
    return [slot_value for member in members if (slot_value := read_member(member, value)) is not None]


def cached_values(wrapper: Any) -> list[Any]:
    """What an `lru_cache` keeps: its values and keys (`gc` sees them in the wrapper or in one inner dict)."""
    own = instance_dict(wrapper)
    cached: list[Any] = []
    for referent in gc.get_referents(wrapper):
        if referent is own or issubclass(type(referent), _CLOSED):
            continue
        if type(referent) is dict:
            cached += [*referent.keys(), *referent.values()]
        elif name_of(type(referent)) == "_lru_list_elem":
            cached += gc.get_referents(referent)
        else:
            cached.append(referent)
    return cached


def storages_in(values: Iterable[Any], depth: int = _DEPTH) -> Iterator[tuple[StorageFacts, Any]]:
    """Each storage inside values once, with its facts. Drop the storages soon: they are the memory itself."""
    seen: set[tuple[str, int]] = set()
    for tensor in tensors_in(values, depth):
        facts = storage_facts(tensor)
        if facts is not None and (facts.device, facts.address) not in seen:
            seen.add((facts.device, facts.address))
            yield facts, plain(tensor).untyped_storage()
