"""The owner of each tensor of another process, from its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from memtriage.account.ownership import Owners, TensorFacts
from memtriage.observe.kinds import TENSOR
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.naming import RemoteNamer


class _RemoteFacts(TensorFacts):
    """Facts of a heap of another process; tensors are known by the addresses of their C++ objects."""

    def __init__(self, graph: RemoteGraph, namer: RemoteNamer) -> None:
        super().__init__(graph, namer)
        self._graph = graph

    def attributes(self, position: int) -> Mapping[str, int]:
        klass = self._graph.type_at(position)
        return (
            {} if klass is None else dict(self._graph.heap.attributes(self._graph.objects[position], klass))
        )

    def tensors_in(self, value: int | None, depth: int) -> Iterator[int]:
        return _tensors_in(self._graph, value, depth)

    def saved(self) -> Iterator[int]:
        return iter(self._graph.saved)

    def gradients(self) -> Iterator[int]:
        tensors = (self._graph.objects[position] for position in self._graph.tensors)
        return filter(None, map(self._graph.torch.gradient, tensors))

    def tensor_at(self, position: int) -> int | None:
        return self._graph.objects[position] if self._graph.kinds[position] == TENSOR else None

    def is_wrapper(self, position: int) -> bool:
        klass = self._graph.type_at(position)
        return klass is not None and self._graph.heap.declares(klass, "__tensor_flatten__")

    def module_at(self, position: int) -> str:
        klass = None if self._graph.kinds[position] == TENSOR else self._graph.type_at(position)
        return "" if klass is None else klass.module


def owners_in(graph: RemoteGraph, namer: RemoteNamer) -> Owners:
    """Return what each tensor of a graph is."""
    return Owners(_RemoteFacts(graph, namer))


def _tensors_in(graph: RemoteGraph, value: int | None, depth: int) -> Iterator[int]:
    """Tensors inside containers, so many levels down."""
    heap = graph.heap
    klass = heap.type_of(value) if value else None
    if not value or klass is None:
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
