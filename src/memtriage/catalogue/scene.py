"""The objects of the process, searched once for all entries of the catalogue."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Final, Self

from memtriage.catalogue.contents import LRU, class_of, tensors_in
from memtriage.observe.autograd import is_node_type
from memtriage.observe.classes import addresses, instance_dict, name_of
from memtriage.observe.objects import tracked_objects
from memtriage.observe.tensors import storage_facts

_LEFT_OUT: Final = addresses(
    dict, list, tuple, set, frozenset, types.CellType, types.MethodType, types.BuiltinFunctionType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.CodeType, property, staticmethod, classmethod,
)  # fmt: skip


class Scene:
    """`with Scene() as scene:` what is loaded and which objects there are, while the block lasts.

    It holds every object that it lists: what is freed inside the block stays until its end. Objects that
    `gc.freeze()` put aside are not among them.

    Args:
        objects: the objects; by default all that the collector knows.
    """

    def __init__(self, objects: Iterable[Any] | None = None) -> None:
        self._given = objects
        # By address: a metaclass may hash its classes with code of its own.
        self._by_type: defaultdict[int, list[Any]] = defaultdict(list)
        self._modules: list[tuple[str, Any]] | None = None
        self._registered: set[tuple[str, int]] | None = None

    def __enter__(self) -> Self:
        by_type = self._by_type
        for obj in tracked_objects() if self._given is None else self._given:
            kind = id(type(obj))
            if kind not in _LEFT_OUT:
                by_type[kind].append(obj)
        self._given = None
        return self

    def __exit__(self, *exception: object) -> None:
        self._by_type.clear()
        self._modules = self._registered = None

    def instances(self, wanted: Callable[[type], bool]) -> Iterator[Any]:
        """Objects of the types that `wanted` says yes to."""
        for objects in [group for group in self._by_type.values() if wanted(type(group[0]))]:
            yield from objects

    def subclasses(self, module: str, name: str) -> Iterator[Any]:
        """Objects of a class, or of one derived from it, of a module that may not be loaded."""
        base = class_of(module, name)
        return self.instances(lambda kind: issubclass(kind, base))

    def of_type(self, kind: type) -> list[Any]:
        """Objects of exactly this type."""
        return self._by_type.get(id(kind), [])

    @property
    def lru_caches(self) -> list[Any]:
        """Functions under `functools.lru_cache`."""
        return self.of_type(LRU)

    def contexts(self) -> Iterator[Any]:
        """Nodes of custom autograd Functions: what their `forward` and `backward` get as `ctx`.

        Nodes of built-in operations have a Python object only while somebody refers to them.
        """
        return self.instances(is_node_type)

    @property
    def modules(self) -> list[tuple[str, Any]]:
        """Every `nn.Module` with its path below the outermost one, which goes by its class's name."""
        if self._modules is None:
            self._modules = _named_modules(list(self.subclasses("torch.nn", "Module")))
        return self._modules

    def registered_storages(self) -> set[tuple[str, int]]:
        """(device, address) of the storages of the modules' parameters and buffers."""
        if self._registered is None:
            own = [instance_dict(module) or {} for _, module in self.modules]
            parts = [attributes.get(name) or {} for attributes in own for name in ("_parameters", "_buffers")]
            tensors = [tensor for part in parts for tensor in tensors_in(dict.values(part))]
            known = [facts for tensor in tensors if (facts := storage_facts(tensor)) is not None]
            self._registered = {(facts.device, facts.address) for facts in known}
        return self._registered

    @staticmethod
    def loaded(package: str) -> list[tuple[str, ModuleType]]:
        """The loaded modules of a package and below it; of no other whose name begins alike."""
        below = f"{package}."
        return [
            (name, module)
            for name, module in list(sys.modules.items())
            if (name == package or name.startswith(below)) and issubclass(type(module), ModuleType)
        ]


def _named_modules(modules: list[Any]) -> list[tuple[str, Any]]:
    below: dict[int, list[tuple[str, Any]]] = {}
    inner: set[int] = set()
    for module in modules:
        children = (instance_dict(module) or {}).get("_modules")
        own = [(name, child) for name, child in dict.items(children or {}) if child is not None]
        below[id(module)] = own
        inner.update(id(child) for _, child in own)
    named: list[tuple[str, Any]] = []
    seen: set[int] = set()
    # Modules that contain each other have no outermost one: they come last, in any order.
    for start in [*(module for module in modules if id(module) not in inner), *modules]:
        waiting = [(name_of(type(start)), start)]
        while waiting:
            path, module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            named.append((path, module))
            own = below.get(id(module), [])
            waiting += [(f"{path}.{name}", child) for name, child in reversed(own)]
    return named
