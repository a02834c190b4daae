"""Tokens that stay with an object or a storage while it lives, to recognize it in the next walk.

An address is not an identity: a new object may get the address of a freed one. Objects that support weak
references are followed by one. Lists, dicts, tuples and running functions do not: they keep their token only
while the object at the address still holds a storage that it held at the previous walk. An object that cannot
be shown to be the same gets a new token.

Storages are followed by weak references to their Python objects, which live as long as they do. (C++'s weak
pointers would keep the records of dead storages, some hundred bytes each.) Only a few storages of each holder
are followed: its witnesses. Tensors get no weak reference, because `torch.utils.swap_tensors`, which
`module.to()` may use, refuses tensors that have one.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from memtriage.observe.classes import variables_of
from memtriage.observe.kinds import FrameLocals
from memtriage.observe.loaded_modules import modules
from memtriage.observe.tensors import plain

_WITNESSES: Final = 16
"""Storages of each holder that are followed: enough to decide whether most of them are still there."""
_takes_weak_references: Final = vars(type)["__weakrefoffset__"].__get__


@dataclass(frozen=True, slots=True)
class _Known:
    """An object as the last walk saw it: its token, and how to recognize it."""

    token: int
    ref: weakref.ref[Any] | None
    witnesses: frozenset[int]


class Identities:
    """Tokens of the objects that hold storages, from walk to walk. Keeps no object and no tensor alive.

    Use one for all walks whose objects will be compared, and drop it after the last one.
    """

    def __init__(self) -> None:
        self._tokens = itertools.count(1)
        self._before: dict[Hashable, _Known] = {}
        self._now: dict[Hashable, _Known] = {}
        # Token of storages, and a weak reference, by the address of their record.
        self._storages_before: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._storages_now: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def begin(self) -> None:
        """Begin a walk: forget objects and storages that the previous walk did not see."""
        self._before, self._now = self._now, {}
        self._storages_before, self._storages_now = self._storages_now, {}

    def witnesses(self, tensors: Sequence[Any]) -> frozenset[int]:
        """Return tokens of some of a holder's storages: a few, and all those that were chosen before.

        Args:
            tensors: one of each storage.
        """
        storages: list[Any] = [plain(tensor).untyped_storage() for tensor in tensors]
        now = self._storages_now
        for storage in storages:
            if _same(self._storages_before, storage):
                now[storage._cdata] = self._storages_before[storage._cdata]
        chosen = min(len(storages), _WITNESSES)
        for number in range(chosen):
            storage = storages[number * (len(storages) - 1) // max(1, chosen - 1)]
            if not _same(now, storage):
                now[storage._cdata] = next(self._tokens), weakref.ref(storage)
        return frozenset(now[storage._cdata][0] for storage in storages if _same(now, storage))

    def token(self, obj: Any, witnesses: frozenset[int]) -> int:
        """Return the object's token; call it once per walk.

        Args:
            obj: what holds storages: a container, an instance, a module, a running function's variables.
            witnesses: of the storages that it holds.
        """
        key = self._key(obj)
        before = self._before.get(key)
        if _takes_weak_references(type(obj)) and not issubclass(type(obj), sys.modules["torch"].Tensor):
            same = before is not None and before.ref is not None and before.ref() is obj
            known = _Known(self._token(before if same else None), weakref.ref(obj), frozenset())
        else:
            same = before is not None and not witnesses.isdisjoint(before.witnesses)
            known = _Known(self._token(before if same else None), None, witnesses)
        self._now[key] = known
        return known.token

    def lasting(self, obj: Any) -> int | None:
        """Return the object's token, whatever it holds; None if it supports no weak references."""
        known = self._now.get(self._key(obj))
        if known is None and _takes_weak_references(type(obj)):
            return self.token(obj, frozenset())
        return None if known is None or known.ref is None else known.token

    def _token(self, same: _Known | None) -> int:
        return next(self._tokens) if same is None else same.token

    def _key(self, obj: Any) -> Hashable:
        """Where to look for an object: its address, or a function, which may run several times."""
        if type(obj) is not FrameLocals:
            return id(obj)
        keys = ((id(obj.code), obj.thread, number) for number in itertools.count())
        return next(key for key in keys if key not in self._now)


class Addresses(Identities):
    """Addresses as tokens, for one census that another process compares with others.

    Nothing stays in this process. Another object may get an address between two censuses, but then a holder
    would not grow at each of four in a row.
    """

    def begin(self) -> None:
        self._now = {}

    def witnesses(self, tensors: Sequence[Any]) -> frozenset[int]:
        """Return the addresses of all storages of a holder."""
        return frozenset(plain(tensor).untyped_storage().data_ptr() for tensor in tensors)

    def token(self, obj: Any, witnesses: frozenset[int]) -> int:
        """Return the object's address, its token as long as it lives."""
        key = self._key(obj)
        self._now[key] = _Known(0, None, witnesses)
        return hash(key)


def _same(followed: dict[int, tuple[int, weakref.ref[Any]]], storage: Any) -> bool:
    """Whether this storage is one of those that are followed."""
    known = followed.get(storage._cdata)
    return known is not None and known[1]() is storage


def module_namespaces() -> dict[int, ModuleType]:
    """Every loaded module, by the address of its variables' dict."""
    return {id(variables_of(module)): module for module in modules()}
