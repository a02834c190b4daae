"""Which module and which line of the program make which allocation.

In backward the module and the line are those in which the running node was made, known by its sequence
number; a checkpointed module that runs again is on the stack itself.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from inspect import unwrap
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from memtriage.model.code_origin import is_torch
from memtriage.observe.origin import CodeOrigin

_CALL: Final = nn.Module._call_impl.__code__
_BACKWARD: Final = unwrap(torch.autograd.graph._engine_run_backward).__code__


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
    """The module and the line from one sequence number of autograd's nodes to the next."""

    def __init__(self) -> None:
        self._since: list[int] = []
        self._values: list[tuple[str | None, str | None]] = []

    def note(self, number: int, value: tuple[str | None, str | None]) -> None:
        """From this number on it is another. What came first with a number is its operator's."""
        if not self._since or self._since[-1] != number:
            self._since.append(number)
            self._values.append(value)

    def of(self, node: Any) -> tuple[str | None, str | None] | None:
        """What held when a node was made; None for one that accumulates a gradient."""
        if getattr(node, "variable", None) is not None:
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
        self._made = _BySequence()
        self._origin = CodeOrigin()
        self._begun_in = os.getcwd() + os.sep

    def note(self, block: int) -> None:
        """A block was allocated."""
        node = torch._C._current_autograd_node()
        calls, line = self._running()
        if node is None or calls:
            # The node of the operator that allocates was made just before.
            number = torch.autograd._get_sequence_nr() - 1
            place = self._module(calls)
            self._made.note(number, (place, line))
        else:
            place, line = self._made.of(node) or (None, None)
        if place is not None:
            self.of[block] = place
        if line is not None:
            self.sites[block] = line

    def _running(self) -> tuple[list[dict[str, Any]], str | None]:
        """The local variables of the calls of modules, innermost first, and the line that runs.

        Frames are looked at, since `torch.compile` would trace hooks of modules. What called a backward does
        not count.
        """
        calls: list[dict[str, Any]] = []
        found = library = None
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not _BACKWARD:
            name = frame.f_code.co_filename
            if frame.f_code is _CALL:
                calls.append(frame.f_locals)
            elif found is None and self._origin.is_user_file(name):
                found = frame
            elif library is None and name.endswith(".py") and not is_torch(name):
                library = None if self._origin.is_own_file(name) else frame
            frame = frame.f_back  # type: ignore[assignment]
        of_user = found is not None
        found = found or library
        if found is None:
            return calls, None
        file = found.f_code.co_filename
        short = file.removeprefix(self._begun_in) if of_user else os.path.basename(file)
        return calls, f"{short}:{found.f_lineno} in {found.f_code.co_name}"

    def _module(self, calls: Sequence[Mapping[str, Any]]) -> str | None:
        """The path of the innermost module that is called."""
        name = None
        for call in reversed(calls):
            module = call["self"]
            if module not in self.names:
                if name is None:
                    self.names.update(module_names([module]))
                else:
                    self.names[module] = f"{name}.({type(module).__name__})"
            if name is None and (given := described([*call["args"], call["kwargs"]])):
                self.inputs[type(module).__name__] = given
            name = self.names[module]
        return name
