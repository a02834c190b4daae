"""What each tensor *is*: parameter, gradient, optimizer state, buffer, saved for backward, ..."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memtriage.account.paths import PathNamer
from memtriage.model.census import Owner
from memtriage.model.paths import HolderPath, SegmentKind, has
from memtriage.observe import autograd
from memtriage.observe.classes import declares, instance_dict, module_of
from memtriage.observe.edges import is_sparse
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import TENSOR
from memtriage.observe.objects import tuple_items
from memtriage.observe.tensors import plain

PRIORITY: tuple[Owner, ...] = (
    "parameter",
    "buffer",
    "optimizer state",
    "gradient",
    "saved for backward",
    "autograd context",
    "communication buffer",
    "known cache",
    "garbage",
    "variable",
    "c++ only",
)
"""When several tensors share a storage, or one tensor plays several parts, the first of these wins."""

RANK: dict[Owner, int] = {owner: rank for rank, owner in enumerate(PRIORITY)}
_STATE_DEPTH = 4
"""How deep an optimizer's groups and states are searched: `state[p]["shampoo"]["blocks"][0]` has four."""
_INNER_DEPTH = 4
"""Holders from an inner tensor up to the tensor subclass that it is part of."""
_BUFFER_DEPTH = 8
"""Holders from a tensor up to the reducer or bucket of `torch.distributed` that owns it."""


def declared_owners(graph: HeapGraph) -> dict[int, Owner]:
    """Owner by tensor id, from the structures that say so: modules, optimizers, `.grad`, saved values."""
    owners: dict[int, Owner] = {}

    def claim(tensor: Any, owner: Owner) -> None:
        key = id(tensor)
        if key not in owners or RANK[owner] < RANK[owners[key]]:
            owners[key] = owner

    for position in graph.modules:
        own = instance_dict(graph.objects[position]) or {}
        for name, owner in _MODULE_PARTS:
            for value in _tensors_in(graph, own.get(name), 1):
                claim(value, owner)
    # Only what optimizers store: `param_groups` and `state` of wrappers are properties, and the optimizer
    # that these read is in the graph itself. Wrappers come first: the flat master weights that a sharded or
    # mixed-precision one keeps are parameters to the optimizer inside, but not the model's.
    attributes = [instance_dict(graph.objects[position]) or {} for position in graph.optimizers]
    for own in sorted(attributes, key=lambda own: "param_groups" in own):
        for parameter in _tensors_in(graph, own.get("param_groups"), _STATE_DEPTH):
            owners.setdefault(id(parameter), "parameter")
        for value in _tensors_in(graph, own.get("state"), _STATE_DEPTH):
            claim(value, "optimizer state")
        for value in _tensors_in(graph, own, 3):
            claim(value, "optimizer state")
    saved: Owner = "saved for backward"  # what a pack hook returned is told by its path, in `owner_of`
    for key in graph.reader.saved:
        if key not in owners or RANK[saved] < RANK[owners[key]]:
            owners[key] = saved
    for position in graph.tensors:
        tensor = plain(graph.objects[position])
        try:
            gradient = tensor.grad if tensor.grad_fn is None or tensor.retains_grad else None
        except RuntimeError:  # a functorch wrapper
            gradient = None
        if gradient is not None:
            claim(gradient, "gradient")
    return owners


_MODULE_PARTS: tuple[tuple[str, Owner], ...] = (("_parameters", "parameter"), ("_buffers", "buffer"))


def _tensors_in(graph: HeapGraph, value: Any, depth: int) -> Iterator[Any]:
    """Tensors inside containers, so many levels down.

    A subclass's own methods are not asked: `__getitem__` of DeepSpeed's parameter dict gathers the parameter.
    """
    kind = type(value)
    items: list[Any] = []
    if graph.kinds[kind] == TENSOR:
        yield value
    elif issubclass(kind, dict):
        items = list(dict.values(value))
    elif issubclass(kind, list):
        items = list(list.__iter__(value))
    elif issubclass(kind, tuple):
        items = tuple_items(value)
    if depth:
        for item in items:
            yield from _tensors_in(graph, item, depth - 1)


def owner_of(graph: HeapGraph, namer: PathNamer, declared: dict[int, Owner], position: int) -> Owner:
    """Owner of the tensor at a position: as declared, else its wrapper's, else what its path says."""
    at, steps = position, 0
    while at >= 0 and steps < _INNER_DEPTH:  # inner tensors of a subclass are what the subclass instance is
        obj = graph.objects[at]
        if graph.kinds[type(obj)] == TENSOR:
            owner = declared.get(id(obj))
            if owner is not None and (at == position or _is_inner(graph, obj)):
                return owner
        at = graph.parents[at]
        steps += 1
    if position >= graph.first_garbage:
        return "garbage"
    return _by_path(graph, namer, position)


def _is_inner(graph: HeapGraph, wrapper: Any) -> bool:
    return declares(type(wrapper), "__tensor_flatten__") or is_sparse(wrapper)


def _by_path(graph: HeapGraph, namer: PathNamer, position: int) -> Owner:
    path = namer.path(position)
    tail = path.whole[len(path.anchor) :]
    if any(segment.kind is SegmentKind.CONTEXT and segment.name for segment in tail):
        return "autograd context"
    if has(tail, SegmentKind.SAVED):
        return "saved for backward"
    if has(path.whole, SegmentKind.LRU_CACHE):
        return "known cache"
    at, steps = position, 0
    while at >= 0 and steps < _BUFFER_DEPTH:
        kind = type(graph.objects[at])
        if graph.kinds[kind] != TENSOR and module_of(kind).startswith("torch.distributed"):
            return "communication buffer"
        at = graph.parents[at]
        steps += 1
    return "variable"


def module_of_nodes(graph: HeapGraph, namer: PathNamer) -> dict[int, HolderPath]:
    """For each autograd node (by id), the path of the module that most likely ran the operation.

    Autograd does not record modules, and hooks that would are not installed (they break graphs of
    torch.compile). The parameters do tell: a node whose next edge accumulates into `model.fc.weight` ran in
    `model.fc`; the others take over from the input that was made last.
    """
    homes: dict[int, int] = {}
    for position in graph.modules:
        own = instance_dict(graph.objects[position]) or {}
        for parameter in _tensors_in(graph, own.get("_parameters"), 1):
            homes.setdefault(id(parameter), position)
    names: dict[int, HolderPath] = {}
    order: list[tuple[int, Any]] = []
    for position in graph.nodes:
        node = graph.objects[position]
        variable = getattr(node, "variable", None)
        if variable is not None:
            home = homes.get(id(variable))  # other leaves belong to no module
            if home is not None:
                names[id(node)] = namer.path(home).whole
        else:
            order.append((_sequence(node), node))
    order.sort(key=lambda pair: pair[0])
    made: dict[int, int] = {}
    for sequence, node in order:
        best, when = None, -1
        for after in autograd.next_nodes(node):
            name = names.get(id(after))
            at = made.get(id(after), 1 << 62)  # a parameter of its own decides
            if name is not None and at > when:
                best, when = name, at
        if best is not None:
            names[id(node)] = best
        made[id(node)] = sequence
    return names


def _sequence(node: Any) -> int:
    try:
        return int(node._sequence_nr())
    except (RuntimeError, AttributeError):
        return 0
