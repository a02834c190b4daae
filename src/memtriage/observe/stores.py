"""The line of the program that stores into a holder, found in the source.

The holder path names a container or a variable, and its function, class or module. The statements in the
program's own files that store under this name are collected (`store_statements`). A line is only reported if
it is the only one left.

Known limitations: stores through arguments, and stores by libraries, are not found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from memtriage.model.paths import HolderPath, PathSegment, SegmentKind
from memtriage.observe.store_statements import (
    Store,
    StoreTarget,
    called,
    parsed,
    short_source,
    stores_into,
    words,
)

_THREADS: Final = frozenset(("Thread", "Timer"))
_SCOPES: Final = frozenset((SegmentKind.FRAME, SegmentKind.GENERATOR, SegmentKind.DEFAULT_ARGUMENT))
_CLOSURES: Final = frozenset((SegmentKind.CLOSURE, SegmentKind.HOOK_CLOSURE))
_NAMES: Final = frozenset(
    (SegmentKind.VARIABLE, SegmentKind.ATTRIBUTE, SegmentKind.HOOKS, SegmentKind.ITEM, SegmentKind.CONTEXT)
    + (SegmentKind.CONTEXT_VARIABLE,)
)


def storing_line(anchor: HolderPath, files: Sequence[str], allocated: str | None = None) -> Store | None:
    """Find the only statement that stores into the holder; None if there are none or several.

    Args:
        anchor: what the program itself holds, from the census.
        files: source files of the program with the holder's function, class or module.
        allocated: `file.py:line in function` where the stored value was made, to decide between several.
    """
    if any(segment.kind is SegmentKind.LRU_CACHE for segment in anchor):
        return _definition(next(s.name for s in anchor if s.kind is SegmentKind.LRU_CACHE), files)
    table = _table_of_hooks(anchor)
    if table is not None:
        kind = anchor[table].name.removeprefix("_global").strip("_").removesuffix("s")
        return registering_line(anchor[table + 2 :], files, kind)
    # The variables of a failed function are kept by what keeps the exception.
    kinds = [segment.kind for segment in anchor]
    if SegmentKind.TRACEBACK in kinds[1:]:
        anchor = anchor[: kinds.index(SegmentKind.TRACEBACK, 1)]
    files = list(dict.fromkeys(files))
    made: Store | None = None
    for holder in _containers(anchor, files):
        target = _target(holder)
        if target is None:
            continue
        # What grows may be a container within it, or within its entries: to make it stores nothing there.
        inside = len(holder) < len(_containing(anchor)) or any(map(_varies, anchor[len(holder) + 1 :]))
        target = replace(target, inside=inside)
        ranked = [
            (rank, replace(store, depth=len(holder)))
            for file in files
            for rank, store in stores_into(file, target)
        ]
        if _is_part_of_entry(holder):
            # A constructor makes the entry, but the line that adds it keeps it.
            made = made or _only_one([one for one in ranked if one[1].constructs], allocated)
            ranked = [one for one in ranked if not one[1].constructs]
        if not ranked:
            continue
        if any(segment.kind is not SegmentKind.ITEM for segment in anchor[len(holder) :]):
            value = None if made is None else made.value
            ranked = [(rank, replace(store, value=value, itself=False)) for rank, store in ranked]
        return _only_one(ranked, allocated) or made
    return made


def _only_one(ranked: Sequence[tuple[int, Store]], allocated: str | None) -> Store | None:
    """Return the only statement of the lowest rank; if there are several, the one that allocates."""
    best = min((rank for rank, _ in ranked), default=0)
    left = {(store.filename, store.line): store for rank, store in ranked if rank == best}
    if len(left) > 1 and allocated is not None:
        at = allocated.partition(" in ")[0]
        left = {key: one for key, one in left.items() if f"{key[0]}:{key[1]}".endswith(at)} or left
    return next(iter(left.values())) if len(left) == 1 else None


def pack_hook(files: Sequence[str]) -> Store | None:
    """Find the only `saved_tensors_hooks(pack, unpack)` of the program; its value is `pack`."""
    return _sole(
        Store(file, node.lineno, short_source(node.args[0]))
        for file, node in _nodes(files, ast.Call)
        if called(node.func) == "saved_tensors_hooks" and node.args
    )


def _nodes(files: Sequence[str], *kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Yield the nodes of some kinds in source files, each after its file."""
    for file in dict.fromkeys(files):
        if (tree := parsed(file)) is not None:
            yield from ((file, node) for node in ast.walk(tree) if isinstance(node, kinds))


def _sole(stores: Iterable[Store]) -> Store | None:
    found = list(stores)
    return found[0] if len(found) == 1 else None


def _table_of_hooks(anchor: HolderPath) -> int | None:
    """Return the position of a table of hooks in a path, if its entries are the last that vary."""
    varying = [at for at, segment in enumerate(anchor) if _varies(segment)]
    is_table = bool(varying) and varying[-1] and anchor[varying[-1] - 1].kind is SegmentKind.HOOKS
    return varying[-1] - 1 if is_table else None


def registering_line(hook: HolderPath, files: Sequence[str], kind: str = "hook") -> Store | None:
    """Find the only call that registers a hook of a kind: `register_forward_hook` for `forward_hook`.

    Of several, it is the only one whose argument names the hook's function.

    Args:
        hook: the path from the hook on.
        files: source files of the program.
        kind: `hook` for those of a tensor or a node.
    """
    function = hook[0].name.rpartition(".")[2] if hook else ""
    calls = [
        (Store(file, node.lineno, None), {called(each) for each in ast.walk(node)})
        for file, node in _nodes(files, ast.Call)
        if _registers(called(node.func), kind)
    ]
    return _sole(store for store, names in calls if len(calls) == 1 or function in names)


def _registers(name: str, kind: str) -> bool:
    if kind == "hook":  # of a tensor
        return name in ("register_hook", "register_post_accumulate_grad_hook")
    return name.startswith("register_") and name.endswith(f"_{kind}")


def making_line(anchor: HolderPath, files: Sequence[str]) -> Store | None:
    """Find the only call of the program that makes what a library keeps; None if there are none or several.

    It makes a thread, or an object of a class that keeps something for each of its objects.

    Args:
        anchor: as for `storing_line`.
        files: source files of the program.
    """
    root = anchor[0]
    if root.kind is SegmentKind.THREAD:
        names = _THREADS
    elif root.kind is SegmentKind.CLASS:
        names = frozenset({root.name.rpartition(".")[2]})
    else:
        return None
    return _sole(
        Store(file, node.lineno, None) for file, node in _nodes(files, ast.Call) if called(node.func) in names
    )


def forget_sources() -> None:
    """Drop the parsed sources, which take many times the size of the files."""
    parsed.cache_clear()
    words.cache_clear()


def _definition(function: str, files: Sequence[str]) -> Store | None:
    """The `def` of a cached function."""
    name = function.rpartition(".")[2]
    return _sole(
        Store(file, node.lineno, None)
        for file, node in _nodes(files, ast.FunctionDef, ast.AsyncFunctionDef)
        if node.name == name
    )


def _containers(anchor: HolderPath, files: Sequence[str]) -> Iterator[HolderPath]:
    """The path, and the paths of the containers of its last items, because a key need not be in the source.

    Parts of an entry need not be, either: for `players[*].weight` a library stores `weight`, and the program
    the player. The same applies to a library's container, such as `cache.data` of a weak dictionary.
    """
    outermost = _containing(anchor)
    yield from (anchor[:end] for end in range(len(anchor), len(outermost) - 1, -1))
    while outermost[-1].kind is SegmentKind.ATTRIBUTE and len(outermost) > 1:
        if any(_mentions(file, outermost[-1].name) for file in files):
            return
        outermost = outermost[:-1]
        yield outermost


def _containing(anchor: HolderPath) -> HolderPath:
    """The path to the outermost container whose entries vary."""
    while anchor[-1].kind is SegmentKind.ITEM or any(map(_varies, anchor)):
        anchor = anchor[:-1]
    return anchor


def _varies(segment: PathSegment) -> bool:
    return segment.kind is SegmentKind.ITEM and "*" in segment.name


def _is_part_of_entry(holder: HolderPath) -> bool:
    """Whether the last name of a path is a part of the entries of a container."""
    named = max((at for at, segment in enumerate(holder) if not _varies(segment)), default=0)
    return any(map(_varies, holder[:named]))


def _mentions(filename: str, attribute: str) -> bool:
    """Whether a source file has an attribute of this name."""
    tree = parsed(filename) if attribute in words(filename) else None
    nodes = () if tree is None else ast.walk(tree)
    return any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes)


def _target(anchor: HolderPath) -> StoreTarget | None:
    named = [at for at, s in enumerate(anchor) if s.kind in _NAMES and s.name and s.name != "*"]
    if not named or any(anchor[at].kind not in _NAMES for at in range(named[-1], len(anchor))):
        return None
    segment = anchor[named[-1]]
    before = anchor[named[-2]] if len(named) > 1 else None
    if segment.kind is SegmentKind.CONTEXT_VARIABLE:
        return StoreTarget(segment, None, None, True, True)
    if segment.kind is not SegmentKind.VARIABLE:
        return StoreTarget(segment, before, None, True, False)
    scope = anchor[named[-1] - 1] if named[-1] else None
    if scope is None or scope.kind is SegmentKind.MODULE:
        return StoreTarget(segment, None, None, True, True)
    if scope.kind in _SCOPES or scope.kind in _CLOSURES:
        function = scope.name.rpartition(".")[2]
        return StoreTarget(segment, None, function, scope.kind in _CLOSURES, False)
    return None
