"""Objects that no root reaches: held by C++ or the interpreter, or garbage that waits for a collection."""

from __future__ import annotations

import sys
from typing import Any, Final

from memtriage.observe.kinds import ATOM, BOUNDARY, KLASS, NODE, TENSOR, KindTable
from memtriage.observe.objects import not_among
from memtriage.observe.tensors import plain
from memtriage.observe.walker import HeapWalker
from memtriage.process.stdlib import gc


def enter_unrooted(walker: HeapWalker) -> None:
    """Enter what no root reaches: first what something invisible refers to, then garbage cycles.

    If an object has more references than this walk can account for, C++, an interpreter structure or an
    evaluation stack holds it. The others only hold each other.
    """
    graph = walker.graph
    graph.first_unrooted = len(graph.objects)
    index, kinds, skipped = graph.index, walker.kinds, (ATOM, BOUNDARY, KLASS)
    left = list(not_among(walker.everything.objects, index))
    walker.everything.clear()
    left = [obj for obj in left if kinds[type(obj)] not in skipped]
    if not left:
        graph.first_garbage = len(graph.objects)
        return
    gradients = _plain_gradients(left, kinds)
    held = _held_from_outside(left, kinds, gradients)
    for obj in held:
        _enter_with_children(walker, obj)
    held.clear()
    graph.first_garbage = len(graph.objects)
    for obj in sorted(left, key=lambda leftover: id(leftover) in gradients):
        _enter_with_children(walker, obj)


def _enter_with_children(walker: HeapWalker, obj: Any) -> None:
    if id(obj) not in walker.graph.index:
        walker.root(obj, "")
        walker.exhaust()
        walker.release()


def _plain_gradients(left: list[Any], kinds: KindTable) -> frozenset[int]:
    """Return the ids of the gradients without a graph of the tensors in `left`.

    They lead nowhere: each belongs to its tensor, whatever keeps that alive.
    """
    owners = (plain(obj) for obj in left if kinds[type(obj)] == TENSOR and _carries_gradient(obj))
    return frozenset(id(owner.grad) for owner in owners if plain(owner.grad).grad_fn is None)


def _held_from_outside(left: list[Any], kinds: KindTable, gradients: frozenset[int]) -> list[Any]:
    """Objects in `left` that something outside `left` refers to, containers first.

    Only references that the cyclic collector sees count as inside: it never frees a cycle through C++ (output
    -> grad_fn -> ctx -> output), so C++ holds it. A tensor's reference to its gradient also counts as inside,
    if the gradient has no graph (`gradients`).
    """
    count: dict[int, int] = {key: int(key in gradients) for key in map(id, left)}
    _count_references(left, count)
    outside = [
        obj
        for obj, references in zip(left, _reference_counts(left), strict=True)
        if references - _COUNTING > count[id(obj)]
    ]
    tensors = [obj for obj in outside if kinds[type(obj)] == TENSOR]
    nodes = [obj for obj in outside if kinds[type(obj)] == NODE]
    others = [obj for obj in outside if kinds[type(obj)] not in (TENSOR, NODE)]
    # The list names a tensor in a list that C++ holds; a leaf with a gradient leads to the gradient's graph;
    # a custom Function's node says more than an anonymous tensor.
    leaves = [tensor for tensor in tensors if _carries_gradient(tensor)]
    return others + leaves + nodes + [tensor for tensor in tensors if not _carries_gradient(tensor)]


def _reference_counts(objects: list[Any]) -> list[int]:
    return [sys.getrefcount(obj) for obj in objects]


_COUNTING: Final = _reference_counts([object()])[0]
"""The count of an object that only the list refers to; it differs between versions of Python."""


def _count_references(objects: list[Any], count: dict[int, int]) -> None:
    """Add to `count`, by id, how often these objects refer to each object in it.

    A separate function, so that no variable still refers to the last objects afterwards.
    """
    for obj in objects:
        for child in gc.get_referents(obj):
            key = id(child)
            if key in count:
                count[key] += 1


def _carries_gradient(tensor: Any) -> bool:
    tensor = plain(tensor)
    try:
        return tensor.grad_fn is None and tensor.grad is not None
    except (RuntimeError, AttributeError):
        return False
