"""What each tensor of another process is, by the rules of `memtriage.account.owners`."""

from __future__ import annotations

from collections.abc import Iterator

from memtriage.account.owners import RANK
from memtriage.model.census import Owner
from memtriage.model.paths import SegmentKind, has
from memtriage.observe.kinds import TENSOR
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.naming import RemoteNamer

_STATE_DEPTH = 4
_MODULE_PARTS: tuple[tuple[str, Owner], ...] = (("_parameters", "parameter"), ("_buffers", "buffer"))


def declared_owners(graph: RemoteGraph) -> dict[int, Owner]:
    """Owner by tensor, from the structures that say so: modules, optimizers, `.grad`, saved values."""
    owners: dict[int, Owner] = {}

    def claim(tensor: int, owner: Owner) -> None:
        if tensor not in owners or RANK[owner] < RANK[owners[tensor]]:
            owners[tensor] = owner

    for position in graph.modules:
        own = _attributes(graph, position)
        for name, owner in _MODULE_PARTS:
            for tensor in _tensors_in(graph, own.get(name, 0), 1):
                claim(tensor, owner)
    attributes = [_attributes(graph, position) for position in graph.optimizers]
    for own in sorted(attributes, key=lambda own: "param_groups" in own):
        for tensor in _tensors_in(graph, own.get("param_groups", 0), _STATE_DEPTH):
            owners.setdefault(tensor, "parameter")
        for tensor in _tensors_in(graph, own.get("state", 0), _STATE_DEPTH):
            claim(tensor, "optimizer state")
        for value in own.values():
            for tensor in _tensors_in(graph, value, 2):
                claim(tensor, "optimizer state")
    for tensor in graph.saved:
        claim(tensor, "saved for backward")
    for position in graph.tensors:
        gradient = graph.torch.gradient(graph.objects[position])
        if gradient:
            claim(gradient, "gradient")
    return owners


def _attributes(graph: RemoteGraph, position: int) -> dict[str, int]:
    klass = graph.type_at(position)
    return {} if klass is None else dict(graph.heap.attributes(graph.objects[position], klass))


def _tensors_in(graph: RemoteGraph, value: int, depth: int) -> Iterator[int]:
    """Tensors inside containers, so many levels down."""
    heap = graph.heap
    klass = heap.type_of(value) if value else None
    if klass is None:
        return
    items: list[int] = []
    if "torch.Tensor" in klass.bases:
        if tensor := graph.torch.tensor(value):
            yield tensor
    elif not depth:
        return
    elif heap.is_a(klass, dict):
        items = [item for _, item in heap.dict_items(value)]
    elif heap.is_a(klass, list):
        items = heap.list_items(value)
    elif heap.is_a(klass, tuple):
        items = heap.tuple_items(value)
    for item in items:
        yield from _tensors_in(graph, item, depth - 1)


def owner_of(graph: RemoteGraph, namer: RemoteNamer, declared: dict[int, Owner], position: int) -> Owner:
    """Owner of the tensor at a position: as declared, else its wrapper's, else what its path says."""
    at, steps = position, 0
    while at >= 0 and steps < 4:  # inner tensors of a subclass are what the subclass instance is
        if graph.kinds[at] == TENSOR:
            owner = declared.get(graph.objects[at])
            if owner is not None and (at == position or _is_wrapper(graph, at)):
                return owner
        at = graph.parents[at]
        steps += 1
    if position >= graph.first_garbage:
        return "garbage"
    return _by_path(graph, namer, position)


def _is_wrapper(graph: RemoteGraph, position: int) -> bool:
    klass = graph.type_at(position)
    return klass is not None and graph.heap.declares(klass, "__tensor_flatten__")


def _by_path(graph: RemoteGraph, namer: RemoteNamer, position: int) -> Owner:
    path = namer.path(position)
    tail = path.whole[len(path.anchor) :]
    if any(segment.kind is SegmentKind.CONTEXT and segment.name for segment in tail):
        return "autograd context"
    if has(tail, SegmentKind.SAVED):
        return "saved for backward"
    if has(path.whole, SegmentKind.LRU_CACHE):
        return "known cache"
    at, steps = position, 0
    while at >= 0 and steps < 8:
        klass = graph.type_at(at)
        if graph.kinds[at] != TENSOR and klass is not None and klass.module.startswith("torch.distributed"):
            return "communication buffer"
        at = graph.parents[at]
        steps += 1
    return "variable"
