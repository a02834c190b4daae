"""Which module of the program makes which allocation.

Hooks for all modules are there for the time of a trace only (a trace has no compiled code that they could
break). In backward the module is the one in which the running node was made, known by its sequence number; a
checkpointed module that runs again says so itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


def module_names(models: Iterable[nn.Module]) -> MutableMapping[nn.Module, str]:
    """Paths of all modules, e.g. `layers.0.mlp`; those of several models begin with their class.

    The model itself is its class in parentheses.
    """
    roots = list(models)
    names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
    for root in roots:
        kind = type(root).__name__
        for path, module in root.named_modules():
            full = path if len(roots) == 1 or not path else f"{kind}.{path}"
            names.setdefault(module, full or f"({kind})")
    return names


class Places:
    """Notes the module that each allocation belongs to.

    Attributes:
        of: module paths by block.
        names: module paths by module; others are found out when they are called.
    """

    def __init__(self) -> None:
        self.of: dict[int, str] = {}
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._called: list[str] = []
        self._since: list[int] = []
        self._where: list[str | None] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Modules are followed within the block."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note(self, block: int) -> None:
        """A block was allocated."""
        place = self._current()
        if place is not None:
            self.of[block] = place

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        name = self.names.get(module)
        if name is None:
            if self._called:
                name = f"{self._called[-1]}.({type(module).__name__})"
                self.names[module] = name
            else:
                self.names.update(module_names([module]))
                name = self.names[module]
        self._called.append(name)
        self._moved()

    def _leave(self, module: nn.Module, inputs: Any, result: Any) -> None:
        if self._called:
            self._called.pop()
            self._moved()

    def _moved(self) -> None:
        """From this sequence number on, autograd's nodes are another module's."""
        number = torch.autograd._get_sequence_nr()
        where = self._called[-1] if self._called else None
        if self._since and self._since[-1] == number:
            self._where[-1] = where
        else:
            self._since.append(number)
            self._where.append(where)

    def _current(self) -> str | None:
        if self._called:
            return self._called[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            return None  # a gradient is accumulated: named by its parameter
        position = bisect_right(self._since, node._sequence_nr()) - 1
        return self._where[position] if position >= 0 else None
