"""What the rules of mechanisms and cuts look at: facts about one holder, and what its path says."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Final, Literal

from memtriage.model.census import GroupDetail
from memtriage.model.findings import Event
from memtriage.model.paths import (
    ANY_ITEM,
    HolderPath,
    PathSegment,
    SegmentKind,
    has,
    in_words,
    is_entry,
    last_name,
    without_last_item,
)


@dataclass(frozen=True, slots=True)
class Held:
    """What the rules look at: facts about one holder.

    Attributes:
        path: whole path of what grew most.
        anchor: its part before the autograd graph.
        attached: the path continues through the autograd graph.
        owner: what most of the bytes are.
        detail: a closer look at it.
        lengthens: it is one storage that grows at its end.
        known: the entry of the catalogue of known holders that keeps most of it.
        gradients: the program has computed gradients.
        entries_grow: the anchor names more objects than before; None where that is unknown.
        holders_multiply: new containers like the last one on the anchor appear, and each keeps its length.
        above: how many containers further out multiply in the same way.
        ordinary: what grows is ordinary data, and no tensors.
        every: what it grows with, for the sentence.
        joined: it stands for several holders, and the cuts are the best ones of each.
        rate: its growth, in bytes per position of `every`; None if unknown.
    """

    path: HolderPath
    anchor: HolderPath
    attached: bool = False
    owner: str = ""
    detail: GroupDetail = field(default_factory=GroupDetail)
    lengthens: bool = False
    known: str | None = None
    gradients: bool = True
    entries_grow: bool | None = None
    holders_multiply: bool = False
    above: int = 0
    ordinary: bool = False
    every: Event | Literal["second", "run"] = "step"
    joined: bool = False
    rate: float | None = None


_PARTS: Final = frozenset(
    (
        SegmentKind.ATTRIBUTE,
        SegmentKind.ITEM,
        SegmentKind.GRADIENT,
        SegmentKind.PARTIAL,
        SegmentKind.CLOSURE,
        SegmentKind.HOOK_CLOSURE,
        SegmentKind.DEFAULT_ARGUMENT,
        SegmentKind.FUTURE,
        SegmentKind.VARIABLE,
    )
)
"""Kinds that lead from an object to a part of its own."""


def subject(held: Held) -> HolderPath:
    """Return the variable to name: the anchor without frame, and without its item in the last container."""
    return named(held.anchor)


def named(path: HolderPath) -> HolderPath:
    """Return a path without its frame, and without its item in the last container."""
    path = path[1:] if path[0].kind is SegmentKind.THREAD else path
    if len(path) > 1 and path[0].kind is SegmentKind.FRAME:
        path = path[1:]
    return without_last_item(path)


def container(held: Held) -> HolderPath:
    """Return what gets new entries: of entries that are objects with tensors, the container of these."""
    path = subject(held)
    if held.detail.collected is not None and ANY_ITEM in path:
        return path[: path.index(ANY_ITEM)]
    if generators_pile_up(held):
        kinds = [segment.kind for segment in path]
        items = [at for at, each in enumerate(path[: kinds.index(SegmentKind.GENERATOR)]) if each == ANY_ITEM]
        return path[: items[-1]] if items else path
    numbered = [at for at, each in enumerate(path) if each.kind is SegmentKind.ATTRIBUTE and "*" in each.name]
    if numbered and ANY_ITEM not in path[numbered[-1] :] and not held.joined:
        return path[: numbered[-1] + 1]  # registered under one name and a number
    ends_in_items = without_last_item(held.anchor) != held.anchor and not held.holders_multiply
    entries = [at for at, segment in enumerate(path) if is_entry(segment)]
    if ends_in_items or held.entries_grow is False or not entries:
        return path
    place = entries[-1 - min(held.above, len(entries) - 1)]
    parts = path[place:]
    own = all(part.kind in _PARTS for part in parts)
    return path[:place] if own else path


_ROOTS: Final = frozenset((SegmentKind.MODULE, SegmentKind.FRAME, SegmentKind.THREAD))
_EXPRESSION: Final = frozenset((SegmentKind.VARIABLE, SegmentKind.ATTRIBUTE, SegmentKind.ITEM))


def expression(path: HolderPath) -> str:
    """Return a path as the program may write it, `self.losses['lm']`; else its last name.

    It does not reach into the private parts of other objects: `trainer._connector.model.outputs`. Nor into
    an object of C code, whose parts have no names: of `preview.<list>` it is `preview`.
    """
    own = tuple(segment for segment in writable(path) if segment.kind not in _ROOTS)
    named = own and own[0].kind is SegmentKind.VARIABLE and all(each.kind in _EXPRESSION for each in own)
    private = any(each.kind is SegmentKind.ATTRIBUTE and each.name.startswith("_") for each in own[:-1])
    return in_words(own) if named and not private else last_name(path)


def writable(path: HolderPath) -> HolderPath:
    """Return a path up to the first object of C code that leads on, whose parts have no names."""
    named = takewhile(
        lambda each: each.kind is not SegmentKind.ATTRIBUTE or not each.name.startswith("<"), path
    )
    return tuple(named)


def is_context_attribute(segment: PathSegment) -> bool:
    return segment.kind is SegmentKind.CONTEXT and bool(segment.name)


def kept_value(held: Held) -> str:
    """Return the tensor that the program stores, as an expression that a method can be called on.

    Of an entry with several tensors it is a part, `metrics['output']`; `loss` of `losses`.
    """
    value = held.detail.stored_value
    if value and " if " in value:  # the other may be detached
        with suppress(SyntaxError):  # redacted
            choice = ast.parse(value, mode="eval").body
            if isinstance(choice, ast.IfExp):
                value = min(ast.unparse(choice.body), ast.unparse(choice.orelse), key=len)
    if value and value[0] not in "([{":
        value = value if re.fullmatch(r"[\w.]+([(\[].*[)\]])?", value) else f"({value})"
        parts = held.anchor[held.detail.stored_depth :][1:] if held.detail.stored_depth else ()
        if all(part.kind is SegmentKind.ITEM and part != ANY_ITEM for part in parts):
            return value + in_words(parts)
        return value
    key = held.anchor[-1]
    if key.kind is SegmentKind.ITEM and key.name[1:-1].isidentifier():
        return key.name[1:-1]
    variables = [
        segment.name
        for segment in held.anchor
        if segment.kind in (SegmentKind.VARIABLE, SegmentKind.ATTRIBUTE)
    ]
    plural = variables[-1] if variables else "values"
    if "loss" in plural:
        return "loss"
    return plural[:-1] if plural.endswith("s") and len(plural) > 2 else "value"


def carries_graph(held: Held) -> bool:
    """Whether a gradient carries a graph: on the way to what is held, or as what is held itself."""
    hops = pairwise(segment.kind for segment in held.path)
    graph = (SegmentKind.GRADIENT, SegmentKind.GRAD_FN) in hops
    return graph or (held.attached and held.anchor[-1].kind is SegmentKind.GRADIENT)


def on_context(held: Held) -> bool:
    return any(map(is_context_attribute, held.path))


def generators_pile_up(held: Held) -> bool:
    """Whether suspended generators keep it, each its part: not where a container in one of them grows."""
    kinds = [segment.kind for segment in held.anchor]
    if SegmentKind.GENERATOR not in kinds:
        return False
    inside = held.anchor[kinds.index(SegmentKind.GENERATOR) :]
    of_last = inside[:-1] if inside[-1].kind is SegmentKind.ITEM else inside
    return ANY_ITEM not in (of_last if held.holders_multiply else inside)


def hooks_pile_up(held: Held) -> bool:
    """Whether what gets new entries is a table of hooks."""
    return has(container(held)[-1:], SegmentKind.HOOKS)


def only_native(held: Held) -> bool:
    return held.anchor[0].kind is SegmentKind.NATIVE


def is_carried(held: Held) -> bool:
    """Whether the same variables get longer graphs, and no container gets more entries."""
    if held.entries_grow is not None:
        return not held.entries_grow
    return held.detail.carried or ANY_ITEM not in held.anchor


def never_differentiated(held: Held) -> bool:
    return held.attached and not (held.gradients or held.detail.differentiated)
