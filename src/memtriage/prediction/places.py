"""Which module and which line of the program make which allocation.

Hooks for all modules are there for the time of a trace only (a trace has no compiled code that they could
break). In backward the module and the line are those in which the running node was made, known by its
sequence number; a checkpointed module that runs again says so itself.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memtriage.model.code_origin import is_torch
from memtriage.observe.origin import CodeOrigin


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


def described(value: Any) -> str:
    """The shape and type of a tensor, or of all tensors in a list or dictionary of arguments.

    >>> described(([torch.ones(2, 3)], {"mask": torch.ones(2, dtype=torch.bool), "training": True}))
    '2x3 float32, mask 2 bool'
    """
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{'x'.join(str(length) for length in value.shape) or 'scalar'} {kind}"
    if isinstance(value, dict):
        named = ((f"{name} ", described(each)) for name, each in value.items())
        return ", ".join(name + text for name, text in named if text)
    if isinstance(value, (list, tuple)):
        return ", ".join(text for each in value if (text := described(each)))
    return ""


class _BySequence:
    """What holds from one sequence number of autograd's nodes to the next."""

    def __init__(self) -> None:
        self._since: list[int] = []
        self._values: list[str | None] = []

    def note(self, number: int, value: str | None) -> None:
        """From this number on it is another."""
        if self._since and self._since[-1] == number:
            self._values[-1] = value
        else:
            self._since.append(number)
            self._values.append(value)

    def of(self, node: Any) -> str | None:
        """What held when a node was made; None for no node, and for one that accumulates a gradient."""
        if node is None or getattr(node, "variable", None) is not None:
            return None  # a gradient is named by its parameter
        position = bisect_right(self._since, node._sequence_nr()) - 1
        return self._values[position] if position >= 0 else None


class Places:
    """Notes the module and the line that each allocation belongs to.

    Attributes:
        of: module paths by block.
        sites: `file.py:line in function` by block: the innermost line of the program, or of a library of
            Python code other than torch where the program has none.
        inputs: what the models were given, by their class; the last shapes.
        names: module paths by module; others are found out when they are called.
    """

    def __init__(self) -> None:
        self.of: dict[int, str] = {}
        self.sites: dict[int, str] = {}
        self.inputs: dict[str, str] = {}
        self.names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._called: list[str] = []
        self._modules, self._lines = _BySequence(), _BySequence()
        self._origin = CodeOrigin()
        self._begun_in = os.getcwd() + os.sep

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Modules are followed within the block."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note(self, block: int) -> None:
        """A block was allocated."""
        node = None if self._called else torch._C._current_autograd_node()
        place = self._called[-1] if self._called else self._modules.of(node)
        if place is not None:
            self.of[block] = place
        site = self._lines.of(node)
        if node is None:
            site = self._line()
            self._lines.note(torch.autograd._get_sequence_nr() - 1, site)
        if site is not None:
            self.sites[block] = site

    def _line(self) -> str | None:
        """The line that runs."""
        library = None
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if self._origin.is_user_file(name):
                break
            if library is None and name.endswith(".py") and not is_torch(name):
                library = None if self._origin.is_own_file(name) else frame
            frame = frame.f_back  # type: ignore[assignment]
        found = frame or library
        if found is None:
            return None
        file = found.f_code.co_filename
        short = file.removeprefix(self._begun_in) if frame is not None else os.path.basename(file)
        return f"{short}:{found.f_lineno} in {found.f_code.co_name}"

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

    def _leave(self, module: nn.Module, inputs: Any, *others: Any) -> None:
        """`others` are the named arguments and the result; of a forward that fails, its result alone."""
        if not self._called:
            return
        self._called.pop()
        self._moved()
        if not self._called and len(others) > 1 and (given := described([*inputs, others[0]])):
            self.inputs[type(module).__name__] = given

    def _moved(self) -> None:
        """From this sequence number on, autograd's nodes are another module's."""
        where = self._called[-1] if self._called else None
        self._modules.note(torch.autograd._get_sequence_nr(), where)
