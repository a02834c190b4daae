"""What the schema of an operator says: which arguments it writes, whether it may resize them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""What an operator is called with."""

FUNCTIONAL_COLLECTIVES: Final = "_c10d_functional"
"""Namespace of collectives that return what they make."""


@dataclass(frozen=True, slots=True)
class Operator:
    """Facts of one overload.

    Attributes:
        name: e.g. `aten::mm`.
        written: positions of the arguments that it writes.
        written_names: names of the keyword arguments that it writes.
        resizes: whether a written argument may get another size (`resize_`, `set_`, `out=`).
        makes: whether it makes a tensor, and does not only look at one, write to it or view it.
        writes_alone: how many results it has, if all are arguments that it writes; None where one is not.
        has_device: whether it takes a `device`.
        composite: whether C++ breaks it up above autograd, which inference mode leaves out.
        collective: whether it is one of a process group's.
        communicates: whether it is one, or a functional collective, or waits for such.
    """

    name: str
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    resizes: bool
    makes: bool
    writes_alone: int | None
    has_device: bool
    composite: bool
    collective: bool
    communicates: bool

    def targets(self, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
        """The tensors that a call writes."""
        arguments = [args[position] for position in self.written if position < len(args)]
        arguments += [kwargs[name] for name in self.written_names if name in kwargs]
        flat: list[torch.Tensor] = []
        for argument in arguments:
            flat.extend(argument if isinstance(argument, (list, tuple)) else [argument])
        return [tensor for tensor in flat if isinstance(tensor, torch.Tensor)]


@cache
def facts(func: Any) -> Operator:
    """The facts of an overload (`torch.ops.aten.mm.default`)."""
    schema = func._schema
    written: list[int] = []
    names: list[str] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names.append(argument.name)
            if not argument.kwarg_only:
                written.append(position)
    short = schema.name.rpartition("::")[2]
    return Operator(
        name=schema.name,
        written=tuple(written),
        written_names=tuple(names),
        resizes=short.startswith(("resize", "set_")) or any(argument.is_out for argument in schema.arguments),
        makes=any(result.alias_info is None and "Tensor" in str(result.type) for result in schema.returns),
        writes_alone=len(schema.returns)
        if names and all(result.alias_info and result.alias_info.is_write for result in schema.returns)
        else None,
        has_device=any(argument.name == "device" for argument in schema.arguments),
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        collective=schema.name.startswith("c10d::"),
        communicates=schema.name.startswith(("c10d::", FUNCTIONAL_COLLECTIVES)),
    )


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """All tensors in nests of lists, tuples and dicts, in order. `torch.utils._pytree` takes ten times as
    long, which would be a third of a trace."""
    tensors: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            tensors.append(tree)
        elif isinstance(tree, (list, tuple)):
            tensors.extend(tensors_in(*tree))
        elif isinstance(tree, dict):
            tensors.extend(tensors_in(*tree.values()))
    return tensors


def mapped(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The nest with every tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if type(tree) in (list, tuple):
        return type(tree)([mapped(item, change) for item in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[mapped(item, change) for item in tree])
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    return tree
