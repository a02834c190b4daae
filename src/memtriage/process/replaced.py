"""Functions of a module, replaced so that the program sees what it would see without a watch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


class Replaced:
    """Replaces functions of a module or class and puts them back.

    Not seen: calls through a name that was bound before (`from signal import signal` in a module imported
    earlier).

    Args:
        module: whose functions are replaced, or a class that defines them itself.
    """

    def __init__(self, module: ModuleType | type) -> None:
        self._module = module
        self._wrappers: dict[str, Callable[..., Any]] = {}
        self._originals: dict[str, Any] = {}

    def put(self, **wrappers: Callable[..., Any]) -> None:
        """Replace functions by name."""
        self._wrappers = wrappers
        self._originals = {name: getattr(self._module, name) for name in wrappers}
        for name, wrapper in wrappers.items():
            setattr(self._module, name, wrapper)

    def restore(self) -> None:
        """Put the functions back. A wrapper that other code has wrapped in turn stays and passes calls on."""
        for name, wrapper in self._wrappers.items():
            if getattr(self._module, name, None) is wrapper:
                setattr(self._module, name, self._originals[name])
        self._wrappers = {}


def leave_out_caller(error: BaseException) -> None:
    """Take the frame that handles an exception out of its traceback; raised again, it gets no new entry."""
    trace = error.__traceback__
    error.__traceback__ = None if trace is None else trace.tb_next
