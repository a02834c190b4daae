"""Holders of any library: caches, containers and attributes with tensors.

They are reported with their bytes. Their contents belong to the program, so only `lru_cache` is cleared, and
only on request.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from memtriage.catalogue.contents import cached_values, class_of, tensors_in
from memtriage.catalogue.entry import Holder, Place
from memtriage.catalogue.finders import ValueSlot, lru_cache, only
from memtriage.catalogue.scene import Scene
from memtriage.observe.classes import (
    addresses,
    attributes_of,
    instance_dict,
    module_of,
    name_of,
    qualified_name_of,
    variables_of,
)
from memtriage.observe.tensors import storage_facts

_CONTAINERS: Final = (dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict)
_ADDRESSES: Final = addresses(*_CONTAINERS)
_SHALLOW: Final = 4
_LISTED_ELSEWHERE: Final = ("torch", "memtriage", "sys", "gc", "numpy", "builtins")
"""Packages whose own variables are not listed: they have entries of their own."""

_LEAVE: Final = "it belongs to the program; register_holder() lets clear_caches() clear it"


def _has_own_entries(name: str) -> bool:
    return name.partition(".")[0] in _LISTED_ELSEWHERE


def _has_tensors(*values: Any) -> bool:
    return next(tensors_in(values, _SHALLOW), None) is not None


def _lru_caches(scene: Scene) -> Iterator[Place]:
    for wrapper in scene.lru_caches:
        own = instance_dict(wrapper) or {}
        if wrapper.cache_info().currsize and _has_tensors(*cached_values(wrapper)):
            names = [own.get(each) for each in ("__module__", "__qualname__")]
            where = ".".join(name for name in names if type(name) is str)
            yield lru_cache(where or "function", wrapper)


def _module_containers(scene: Scene) -> Iterator[Place]:
    for name, module in every_module():
        for variable, value in list(variables_of(module).items()):
            if id(type(value)) in _ADDRESSES and value and _has_tensors(value):
                yield Place(f"{name}.{variable}", only(value), entries=len(value))


def every_module() -> Iterator[tuple[str, ModuleType]]:
    """The loaded modules in which a program or a library of its may keep tensors."""
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and not _has_own_entries(name) and name != "__mp_main__":
            yield name, module


def _class_containers(scene: Scene) -> Iterator[Place]:
    tensor = class_of("torch", "Tensor")
    for klass in scene.instances(lambda kind: issubclass(kind, type)):
        if _has_own_entries(module_of(klass)):
            continue
        for name, value in list(attributes_of(klass).items()):
            if issubclass(type(value), tensor) or (
                id(type(value)) in _ADDRESSES and value and _has_tensors(value)
            ):
                where = f"{module_of(klass)}.{qualified_name_of(klass)}.{name}"
                yield Place(where, ValueSlot(klass, name).values)


_REGISTERED: Final = ("_parameters", "_buffers", "_modules")


def _module_attributes(scene: Scene) -> Iterator[Place]:
    for path, module, own in _module_variables(scene):
        for name, value in own:
            if issubclass(type(value), class_of("torch", "Tensor")) or id(type(value)) in _ADDRESSES:
                yield from _unregistered(scene, module, f"{path}.{name}", value)


def _module_variables(scene: Scene) -> Iterator[tuple[str, Any, list[tuple[str, Any]]]]:
    for path, module in scene.modules:
        own = instance_dict(module) or {}
        yield path, module, [(name, value) for name, value in own.items() if name not in _REGISTERED]


def _unregistered(scene: Scene, module: Any, path: str, value: Any) -> Iterator[Place]:
    """A place of tensors that share no storage with a parameter or buffer of any module."""
    registered = scene.registered_storages()
    name = path.rpartition(".")[2]

    def values() -> list[Any]:
        kept = (instance_dict(module) or {}).get(name)
        return [tensor for tensor in tensors_in((kept,), _SHALLOW) if _is_its_own(tensor, registered)]

    if any(_is_its_own(tensor, registered) for tensor in tensors_in((value,), _SHALLOW)):
        yield Place(path, values)


def _is_its_own(tensor: Any, registered: set[tuple[str, int]]) -> bool:
    facts = storage_facts(tensor)
    return facts is not None and (facts.device, facts.address) not in registered


def _plain_objects(scene: Scene) -> Iterator[Place]:
    module_class, tensor = class_of("torch.nn", "Module"), class_of("torch", "Tensor")
    left_out = (module_class, tensor, type, ModuleType, *_CONTAINERS)
    for path, module, own in _module_variables(scene):
        for name, value in own:
            kind = type(value)
            if issubclass(kind, left_out) or module_of(kind) == "builtins" or instance_dict(value) is None:
                continue
            yield from _unregistered(scene, module, f"{path}.{name}", value)


def _functions(scene: Scene) -> Iterator[Place]:
    for function in scene.of_type(types.FunctionType):
        if _has_own_entries(str(function.__module__)):
            continue
        where = f"{function.__module__}.{function.__qualname__}"
        for part, values_of in (("default arguments", _defaults), ("closure", _cells)):
            if _has_tensors(*values_of(function)):
                yield Place(f"{part} of {where}", functools.partial(values_of, function))


def _defaults(function: types.FunctionType) -> list[Any]:
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _cells(function: types.FunctionType) -> list[Any]:
    contents: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # not yet assigned
            continue
    return contents


def _contexts(scene: Scene) -> Iterator[Place]:
    for node in scene.contexts():
        own = instance_dict(node)
        if own and _has_tensors(own):
            yield Place(f"ctx of {name_of(type(node))}", only(own))


def _entry(name: str, **words: Any) -> Holder:
    return Holder(name=f"generic.{name}", library="any program", package="", kind="generic", **words)


GENERIC: Final[tuple[Holder, ...]] = (
    _entry(
        "lru_cache",
        symbol="functools.lru_cache over tensors",
        holds="every value and key it has seen, up to its bound; none with maxsize=None",
        find=_lru_caches,
        clears=".cache_clear()",
        refills="at the next call",
        policy="on request",
        why="it is the program's own",
        forbidden=("graphs", "backward"),
    ),
    _entry(
        "module_containers",
        symbol="dicts, lists and the like in variables of modules",
        holds="tensors that the program put there",
        find=_module_containers,
        policy="never",
        why=_LEAVE,
    ),
    _entry(
        "class_attributes",
        symbol="tensors, and containers of them, in attributes of classes",
        holds="tensors that live as long as the class",
        find=_class_containers,
        policy="never",
        why=_LEAVE,
    ),
    _entry(
        "module_attributes",
        symbol="tensors on nn.Modules that are neither parameters nor buffers",
        holds="tensors that model.to(), .cpu() and state_dict() do not see",
        find=_module_attributes,
        policy="never",
        why=_LEAVE,
    ),
    _entry(
        "plain_objects",
        symbol="plain objects that hang off nn.Modules (dispatchers, caches, helpers)",
        holds="tensors that module.modules() does not lead to",
        find=_plain_objects,
        policy="never",
        why=_LEAVE,
    ),
    _entry(
        "contexts",
        symbol="attributes of ctx in custom autograd Functions",
        holds="tensors that backward does not free: they live as long as the node",
        find=_contexts,
        policy="never",
        why="a backward to come may read them; ctx.save_for_backward frees what it has read",
        owner="autograd context",
    ),
    _entry(
        "functions",
        symbol="closures and default arguments of functions",
        holds="tensors that live as long as the function",
        find=_functions,
        policy="never",
        why=_LEAVE,
    ),
)
