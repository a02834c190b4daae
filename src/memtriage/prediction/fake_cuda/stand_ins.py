"""Attributes that are replaced for the time of a trace, by what looks like the original to whoever asks.

Programs and libraries do not only call functions of torch: TorchScript finds its operators by the identity
of a function, `inspect` reads signatures, pickle looks functions up by their names, and schemas are inferred
from annotations. All of that must find the original.

Known limitations: what `__torch_function__` is given is the original, not what `torch` shows meanwhile; and a
stand-in for a function in C is a function in Python (`inspect.isbuiltin`).
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from torch.jit import _builtins

_MISSING: Final = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute is another for the time of the block; a function looks like the one that it stands for."""
    before = vars(owner).get(name, _MISSING)
    original = getattr(owner, name, None)
    # TorchScript collects its operators, by identity, when they are first asked for: now, of true functions.
    operators = _builtins._get_builtin_table()
    value = _looking_like(original, value, owner, name)
    known = operators.get(id(original)) if id(value) not in operators else None
    if known is not None:
        operators[id(value)] = known
    setattr(owner, name, value)
    try:
        yield
    finally:
        if known is not None:
            del operators[id(value)]
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def all_replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes, each by owner, name and value, are others for the time of the block."""
    with ExitStack() as stack:
        for owner, name, value in attributes:
            stack.enter_context(replaced(owner, name, value))
        yield


def _looking_like(original: Any, value: Any, owner: Any, name: str) -> Any:
    """The function with the names, the signature and the source of another; anything else as it is."""
    if not inspect.isroutine(original) or value is original:
        return value
    if isinstance(value, types.MethodType) and isinstance(owner, types.ModuleType):
        method = value
        value = lambda *args, **kwargs: method(*args, **kwargs)  # noqa: E731  its names can be set
    if not isinstance(value, types.FunctionType):
        return value
    if inspect.unwrap(value) is not inspect.unwrap(original):
        # A copy: the same function may stand for several.
        kept = value.__kwdefaults__
        value = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__
        )
        value.__kwdefaults__ = kept
        functools.update_wrapper(value, original)
    # Where pickle finds it: at the original's place, unless another has that, or none, as of one in C.
    module, place = getattr(original, "__module__", None), original.__qualname__
    home = sys.modules.get(module or "")
    found = getattr(home, place, None)
    elsewhere = found is not value and (found is not original or home is not owner)
    if elsewhere and isinstance(owner, types.ModuleType):
        module, place = owner.__name__, name
    elif elsewhere and isinstance(owner, type):
        module, place = owner.__module__, f"{owner.__qualname__}.{name}"
    value.__module__, value.__qualname__ = module, place
    value.__prepare_scriptable__ = lambda: original  # what TorchScript compiles
    return value


def around(original: Callable[..., Any], function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    """A function that calls another with what it is given, after `given` and the original."""
    return lambda *args, **kwargs: function(*given, original, *args, **kwargs)


def accepting(original: Any, answer: Any) -> Any:
    """The stand-in for a function: it accepts what the original accepts, and raises its TypeErrors."""
    if not callable(answer) or isinstance(original, type):
        return answer
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):  # written in C, or not there; then the answer hands on what it is given
        return answer

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return answer(*bound.args, **bound.kwargs)

    return call


def passing_for(original: type, make: Callable[..., Any], module: str = "torch") -> type:
    """A class of the same name whose calls make something else; it passes for the original, which counts as
    equal to it: annotations and registries of classes may have either."""

    class _Type(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is original

        def __hash__(cls) -> int:
            return hash(original)

    names = {"__module__": module, "__doc__": original.__doc__}
    made = lambda cls, *args, **kwargs: make(*args, **kwargs)  # noqa: E731
    return _Type(original.__name__, (), {**names, "__new__": made})
