"""Holder paths: the chain of references that keeps an object alive, from a root to it.

A path is a tuple of segments. Rules look at the segments' kinds and names, never at the printed path, which
only `in_words` makes:

    train.losses['lm'][*] -> grad_fn WrapBackward -> ctx.context[1]
    frame evaluate(): acts[*]
    train.model.fc._forward_hooks[*] -> closure of hook grab: captured['n1'][*]
    functools.lru_cache causal_mask[*]

It is here and not in `report/`, because records have both forms: every layer from `account/` on writes string
fields of JSON, sentences of evidence and details of ledger rows.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

import msgspec


class SegmentKind(StrEnum):
    """What one segment of a holder path is. The comment says what its name is."""

    # --- roots ---
    MODULE = "module"  # a Python module: its name, `__main__` by the script's
    CLASS = "class"  # its name with its module's
    THREAD = "thread"  # the name of a thread that is not the main one; its frame follows
    FRAME = "frame"  # a running function, or one that a traceback keeps: its name
    GENERATOR = "generator"  # a suspended generator, coroutine or asynchronous generator: its name
    LRU_CACHE = "lru_cache"  # the cached function
    CONTEXT_VARIABLE = (
        "context_variable"  # a `contextvars.ContextVar`, of the context that is in use: its name
    )
    GARBAGE_CYCLE = "garbage_cycle"  # the most telling type of what waits for the cyclic collector
    NATIVE = "native"  # what only C++ holds: its type; empty for a graph node, which follows
    UNSEEN = "unseen"  # what C++ or an evaluation stack holds: its type
    NOT_SEARCHED = "not_searched"  # found by a partial census without what leads to it; no name
    KNOWN = "known"  # the entry of the catalogue of known holders that the path belongs to
    OUTPUT = "output"  # a notebook's shown values, `Out`
    LAST_TRACEBACK = "last_traceback"  # the error that a notebook remembers
    # --- Python ---
    VARIABLE = "variable"  # of the module, frame, generator, closure or default argument before it
    ATTRIBUTE = "attribute"  # of an instance or a class
    HOOKS = "hooks"  # an attribute or variable that holds hooks: its name
    GRADIENT = "gradient"  # a tensor's `.grad`
    TRACEBACK = "traceback"  # an exception's `__traceback__`
    ITEM = "item"  # of a list, tuple or dict: its place or key as Python writes it, `*` where that varies
    CLOSURE = "closure"  # a function's closure: the function's name
    HOOK_CLOSURE = "hook_closure"  # the closure of a function that is registered as a hook
    DEFAULT_ARGUMENT = "default_argument"  # a function's defaults: the function's name
    PARTIAL = "partial"  # functools.partial: the function's name
    FUTURE = "future"  # the value of a torch future
    CHECKPOINT = "checkpoint"  # a checkpoint's placeholder for a saved tensor
    # --- the autograd graph ---
    GRAD_FN = "grad_fn"  # the first node: its type; empty for nodes of many types
    LATER_NODE = "later_node"  # the last node of a walk along the graph: its type
    SAVED = "saved"  # what a node saved for backward: the name
    CONTEXT = "context"  # an attribute of a custom Function's context; empty for all of them
    LEAF = "leaf"  # the leaf that a node accumulates a gradient into
    NODE_HOOKS = "node_hooks"  # what hooks on a node hold


class PathSegment(msgspec.Struct, frozen=True, cache_hash=True):
    """One step of a holder path.

    Attributes:
        kind: what it is.
        name: the program's own name of it; empty where the kind says all.
    """

    kind: SegmentKind
    name: str = ""


HolderPath = tuple[PathSegment, ...]

ANY_ITEM: Final = PathSegment(SegmentKind.ITEM, "*")
"""Any place of a list, any key of a dict: folding keeps one path for all of them."""

_NAMING: Final[dict[SegmentKind, str]] = {
    SegmentKind.THREAD: 'thread "{}"',
    SegmentKind.FRAME: "frame {}():",
    SegmentKind.GENERATOR: "generator {}()",
    SegmentKind.LRU_CACHE: "functools.lru_cache {}",
    SegmentKind.CONTEXT_VARIABLE: "context variable {}",
    SegmentKind.GARBAGE_CYCLE: "garbage cycle of {}",
    SegmentKind.NOT_SEARCHED: "(not searched)",
    SegmentKind.OUTPUT: "Out",
    SegmentKind.LAST_TRACEBACK: "last traceback",
    SegmentKind.ATTRIBUTE: ".{}",
    SegmentKind.HOOKS: ".{}",
    SegmentKind.GRADIENT: ".{}",
    SegmentKind.TRACEBACK: ".{}",
    SegmentKind.ITEM: "[{}]",
    SegmentKind.CLOSURE: "closure of {}:",
    SegmentKind.HOOK_CLOSURE: "closure of hook {}:",
    SegmentKind.DEFAULT_ARGUMENT: "default argument of {}:",
    SegmentKind.PARTIAL: "functools.partial {}",
    SegmentKind.FUTURE: "Future.{}()",
    SegmentKind.LATER_NODE: "… -> {}",
}
"""Words around a segment's name, where the name alone does not say what it is."""

_ATTACHED: Final = frozenset(
    (SegmentKind.ATTRIBUTE, SegmentKind.HOOKS, SegmentKind.GRADIENT, SegmentKind.TRACEBACK, SegmentKind.ITEM)
)
_NATIVE: Final = {
    SegmentKind.NATIVE: "C++",
    SegmentKind.UNSEEN: "C++ or an evaluation stack",
}


def in_words(path: HolderPath) -> str:
    """The path as reports print it.

    >>> in_words((PathSegment(SegmentKind.FRAME, "main"), PathSegment(SegmentKind.VARIABLE, "losses")))
    'frame main(): losses'
    """
    text = ""
    before: SegmentKind | None = None
    for segment in path:
        text += _joint(before, segment.kind) + _words(segment) if text else _words(segment).lstrip(".")
        before = segment.kind
    return text


def _joint(before: SegmentKind | None, kind: SegmentKind) -> str:
    """What comes between a segment and the one before it."""
    if before is SegmentKind.KNOWN:
        return ": "
    if kind is SegmentKind.VARIABLE:
        if before is SegmentKind.MODULE:
            return "."
        return ": " if before is SegmentKind.GENERATOR else " "
    if kind in _ATTACHED:
        return ""
    return " " if before is SegmentKind.THREAD else " -> "


def _words(segment: PathSegment) -> str:
    kind, name = segment.kind, segment.name
    fixed = _NAMING.get(kind)
    if fixed is not None:
        return fixed.format(name)
    if kind in _NATIVE:
        return f"{_NATIVE[kind]} -> {name}" if name else _NATIVE[kind]
    match kind:
        case SegmentKind.GRAD_FN:
            return f"grad_fn {name}" if name else "grad_fn"
        case SegmentKind.CONTEXT:
            return f"ctx.{name}" if name else "ctx"
        case SegmentKind.SAVED:
            return f"saved {name}" if name else "saved"
        case _:  # a name says all
            return name


_GRAPH: Final = frozenset(
    (
        SegmentKind.GRAD_FN,
        SegmentKind.LATER_NODE,
        SegmentKind.SAVED,
        SegmentKind.CONTEXT,
        SegmentKind.LEAF,
        SegmentKind.NODE_HOOKS,
    )
)


def anchor_of(path: HolderPath) -> HolderPath:
    """What the program itself holds: the path up to its first hop into the autograd graph."""
    return path[: next((at for at, segment in enumerate(path) if segment.kind in _GRAPH), len(path))]


def has(path: HolderPath, *kinds: SegmentKind) -> bool:
    """Whether a segment of one of these kinds is in the path."""
    return any(segment.kind in kinds for segment in path)


def is_native(path: HolderPath) -> bool:
    """Whether nothing in Python leads to what the path is of: C++ holds it."""
    return path[0].kind in (SegmentKind.NATIVE, SegmentKind.UNSEEN)


def is_hook_of_node(path: HolderPath) -> bool:
    """Whether a path leads through a hook of an autograd node: C++ holds the table of a node's hooks."""
    return (
        len(path) > 2
        and path[0].kind is SegmentKind.UNSEEN
        and path[0].name in ("OrderedDict", "dict")
        and path[1] == ANY_ITEM
    )


def of_any_item(path: HolderPath) -> HolderPath:
    """Return the path that all entries of the same containers have."""
    return tuple(ANY_ITEM if segment.kind is SegmentKind.ITEM else segment for segment in path)


def is_entry(segment: PathSegment) -> bool:
    """Whether a segment is any item of a container, or any whose keys begin or end alike."""
    return segment.kind is SegmentKind.ITEM and "*" in segment.name


def without_last_item(path: HolderPath) -> HolderPath:
    """The container itself, of a path to any of its items, or to all whose keys begin or end alike."""
    return path[:-1] if path and is_entry(path[-1]) else path


def last_name(path: HolderPath) -> str:
    """The last identifier of a path, with the items after it: what a sentence calls its variable.

    A key that could be an identifier is a name of its own.

    >>> last_name((PathSegment(SegmentKind.VARIABLE, "grads"), PathSegment(SegmentKind.ITEM, "'0.weight'")))
    "grads['0.weight']"
    """
    named = (at for at in reversed(range(len(path))) if _is_name(path[at]))
    first = next(named, 0)
    words = in_words(path[first : first + 1])
    identifiers = re.findall(r"[A-Za-z_]\w*", words)
    return (identifiers[-1] if identifiers else words) + in_words(path[first + 1 :])


def _is_name(segment: PathSegment) -> bool:
    return segment.kind is not SegmentKind.ITEM or re.fullmatch(r"'[A-Za-z_]\w*'", segment.name) is not None
