"""The owner of each tensor in this process, and the module that ran each autograd node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memtriage.account.ownership import Owners, TensorFacts
from memtriage.account.paths import PathNamer
from memtriage.model.paths import HolderPath
from memtriage.observe import autograd
from memtriage.observe.classes import declares, instance_dict, module_of
from memtriage.observe.edges import is_sparse
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import TENSOR
from memtriage.observe.objects import tuple_items
from memtriage.observe.tensors import plain


class _LocalFacts(TensorFacts):
    """Facts about a heap of this process; tensors are identified by `id`."""

    def __init__(self, graph: HeapGraph, namer: PathNamer) -> None:
        super().__init__(graph, namer)
        self._graph = graph

    def attributes(self, position: int) -> Mapping[str, Any]:
        return instance_dict(self._graph.objects[position]) or {}

    def tensors_in(self, value: Any, depth: int) -> Iterator[int]:
        return map(id, _tensors_in(self._graph, value, depth))

    def saved(self) -> Iterator[int]:
        return iter(self._graph.reader.saved)

    def gradients(self) -> Iterator[int]:
        for position in self._graph.tensors:
            tensor = plain(self._graph.objects[position])
            try:
                gradient = tensor.grad if tensor.grad_fn is None or tensor.retains_grad else None
            except RuntimeError:  # a functorch wrapper
                gradient = None
            if gradient is not None:
                yield id(gradient)

    def tensor_at(self, position: int) -> int | None:
        obj = self._graph.objects[position]
        return id(obj) if self._graph.kinds[type(obj)] == TENSOR else None

    def is_wrapper(self, position: int) -> bool:
        tensor = self._graph.objects[position]
        return declares(type(tensor), "__tensor_flatten__") or is_sparse(tensor)

    def module_at(self, position: int) -> str:
        kind = type(self._graph.objects[position])
        return "" if self._graph.kinds[kind] == TENSOR else module_of(kind)


def owners_in(graph: HeapGraph, namer: PathNamer) -> Owners:
    """Return what each tensor of a graph is."""
    return Owners(_LocalFacts(graph, namer))


def _tensors_in(graph: HeapGraph, value: Any, depth: int) -> Iterator[Any]:
    """Tensors inside containers, at most `depth` levels down.

    Methods of subclasses are not called: `__getitem__` of DeepSpeed's parameter dict gathers the parameter.
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


def module_of_nodes(graph: HeapGraph, namer: PathNamer) -> dict[int, HolderPath]:
    """Return, by node id, the path of the module that most likely ran the operation of each autograd node.

    Autograd does not record modules, and hooks that would are not installed (they break graphs of
    torch.compile). It is inferred from the parameters: a node whose next edge accumulates into
    `model.fc.weight` ran in `model.fc`; other nodes have the module of their most recently created input.
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
            at = made.get(id(after), 1 << 62)  # its own parameter decides
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
