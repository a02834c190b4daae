"""Read a class or module without running its own code or its metaclass's.

A census meets every class of the process. For some of them `klass.__name__`, `hasattr` or `__dict__` run code
that may raise, import a library or change the program. So the getters of `type` are used instead.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any, Final

_read_module = type.__dict__["__module__"].__get__
_read_name = type.__dict__["__name__"].__get__
_read_qualified_name = type.__dict__["__qualname__"].__get__
_read_bases = type.__dict__["__mro__"].__get__
_read_basic_size = type.__dict__["__basicsize__"].__get__
_read_attributes = type.__dict__["__dict__"].__get__
_read_variables = vars(types.ModuleType)["__dict__"].__get__


def name_of(klass: type) -> str:
    """A class's `__name__`."""
    return str.__str__(_read_name(klass))  # of a subclass of `str`: a plain copy


def qualified_name_of(klass: type) -> str:
    """A class's `__qualname__`."""
    return str.__str__(_read_qualified_name(klass))


def module_of(klass: type) -> str:
    """A class's `__module__`; "" where a class body overwrote it with something else."""
    try:
        name: object = _read_module(klass)
    except AttributeError:
        return ""
    return name if type(name) is str else ""


def bases_of(klass: type) -> tuple[type, ...]:
    """A class and its bases, in the order of attribute look-up."""
    bases: tuple[type, ...] = _read_bases(klass)
    return bases


def attributes_of(klass: type) -> Mapping[str, Any]:
    """What a class itself defines, without its bases."""
    attributes: Mapping[str, Any] = _read_attributes(klass)
    return attributes


def variables_of(module: types.ModuleType) -> dict[str, Any]:
    """A module's variables, without running code of its class: libraries use lazy modules of all kinds."""
    variables: dict[str, Any] = _read_variables(module)
    return variables


def addresses(*classes: type) -> frozenset[int]:
    """Addresses of built-in classes, in which to look up `id(type(obj))`.

    Not the classes themselves, because a metaclass may hash and compare its classes with its own code.
    """
    return frozenset(map(id, classes))


_BUILT_IN_GETTERS: Final = addresses(types.GetSetDescriptorType, types.MemberDescriptorType)


def exactly(obj: object, *classes: type) -> bool:
    """Whether an object is of one of these very classes, which `in` would compare by a metaclass's code."""
    kind = type(obj)
    return any(kind is klass for klass in classes)


def declares(klass: type, name: str) -> bool:
    """Whether a class or a base of it defines an attribute."""
    return any(name in attributes_of(base) for base in bases_of(klass))


def instance_dict(holder: Any) -> dict[str, Any] | None:
    """An object's attributes; None if it has none, or if its class replaces `__dict__` (as proxies do) and no
    base has the real one.
    """
    for base in bases_of(type(holder)):
        getter = attributes_of(base).get("__dict__")
        if id(type(getter)) in _BUILT_IN_GETTERS:
            own = read_member(getter, holder)
            return own if type(own) is dict else None
    return None


def of_class(klass: type, name: str) -> Any:
    """Return what a class, or the first of its bases that defines it, has for an attribute; else None."""
    return next((own[name] for own in map(attributes_of, bases_of(klass)) if name in own), None)


def stored(holder: Any, name: str) -> Any:
    """Return the value of an attribute as an object or its class has it; None if there is none.

    Nothing is called: a property is returned itself.
    """
    own = instance_dict(holder)
    if own is not None and name in own:
        return own[name]
    return of_class(type(holder), name)


def size_of(obj: Any) -> int:
    """Return the bytes of an object as `sys.getsizeof`; if its class counts them in Python, without that."""
    kind = type(obj)
    if type(of_class(kind, "__sizeof__")) is types.MethodDescriptorType:
        return sys.getsizeof(obj, 0)
    size: int = _read_basic_size(kind)
    return size


def read_member(member: Any, holder: Any) -> Any:
    """Read a built-in descriptor of an object; None if the object has no value for it."""
    try:
        return member.__get__(holder)
    except (AttributeError, TypeError, ReferenceError):
        return None
