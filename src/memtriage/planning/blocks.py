"""Finds the repeated blocks of a model: what activation checkpointing wraps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import nn

REPEATS: Final = 2
"""So many children of a container make it one of repeated blocks."""


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Repeated blocks that are not within each other.

    Attributes:
        containers: names of the modules that hold them; `` for the model itself.
        blocks: their names, in order.
        own_switch: whether each has Transformers' `gradient_checkpointing` switch.
    """

    containers: tuple[str, ...]
    blocks: tuple[str, ...]
    own_switch: bool


def levels_of(model: nn.Module) -> tuple[RepeatedBlocks, ...]:
    """The levels of repeated blocks, the outermost first."""
    levels: list[tuple[list[str], list[str]]] = []
    _visit(model, "", 0, levels)
    return tuple(
        RepeatedBlocks(
            tuple(containers),
            tuple(blocks),
            all(hasattr(type(model.get_submodule(name)), "gradient_checkpointing") for name in blocks),
        )
        for containers, blocks in levels
    )


def _visit(module: nn.Module, name: str, depth: int, levels: list[tuple[list[str], list[str]]]) -> None:
    repeated = _repeated(module)
    if repeated:
        while len(levels) <= depth:
            levels.append(([], []))
        levels[depth][0].append(name)
        levels[depth][1].extend(_joined(name, name_inside) for name_inside in repeated)
    for child_name, child in module.named_children():
        _visit(child, _joined(name, child_name), depth + (child_name in repeated), levels)


def _repeated(module: nn.Module) -> list[str]:
    """Names of the children that are blocks: with parameters, and made of modules themselves."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    names = [
        name
        for name, child in module.named_children()
        if any(True for _ in child.children()) and any(True for _ in child.parameters())
    ]
    return names if len(names) >= REPEATS else []


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
