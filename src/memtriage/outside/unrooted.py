"""Objects of another process that no root leads to, as `memtriage.observe.unrooted` enters them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from memtriage.observe.kinds import ATOM, BOUNDARY, KLASS, NODE, PLAIN, TENSOR
from memtriage.outside.memory import Words
from memtriage.outside.references import Edges
from memtriage.outside.walker import RemoteWalker

_REFERENCES: Final = 0xFFFFFFFF
"""Bits of an object's count of references; what is above them marks immortal objects since Python 3.12."""


class Unrooted:
    """Enters what is left when all roots were walked."""

    def __init__(self, walker: RemoteWalker) -> None:
        self._walker = walker
        self._graph = walker.graph
        self._rows = walker.rows
        self._heap = walker.graph.heap
        self._torch = walker.graph.torch
        self._memory = walker.graph.heap.memory
        self._leaves: set[int] = set()

    def enter(self, tracked: Words, rows: Words) -> None:
        """Enter what C++ or an evaluation stack holds, then what only holds itself."""
        graph = self._graph
        graph.first_unrooted = len(graph.objects)
        kinds = self._rows.column("kind", rows)
        chosen = np.flatnonzero((kinds != ATOM) & (kinds != BOUNDARY) & (kinds != KLASS))
        places = self._memory.places(tracked[chosen])
        keys = places.copy()
        tensors = kinds[chosen] == TENSOR
        implemented = self._torch.tensors(places[tensors])
        keys[tensors] = np.where(implemented, self._memory.places(implemented), places[tensors])
        nodes = np.flatnonzero(kinds[chosen] == NODE)
        keys[nodes] = [
            self._memory.place(self._key(address, NODE)) for address in tracked[chosen[nodes]].tolist()
        ]
        chosen = chosen[graph.index.by_place[keys] == 0]
        left = list(zip(tracked[chosen].tolist(), kinds[chosen].tolist(), strict=True))
        if graph.cut is not None:
            for address, kind in left:
                if kind == TENSOR:
                    graph.not_searched.add(len(graph.objects))
                    self._walker.root(self._key(address, kind), TENSOR, "")
                    graph.tensors.append(len(graph.objects) - 1)
            graph.first_unrooted = graph.first_garbage = len(graph.objects)
            return
        gradients = self._plain_gradients(left)
        edges = self._walker.references.of(tracked[chosen], rows[chosen])
        self._leaves = self._without_new_children(edges, tracked[chosen], kinds[chosen])
        for address, kind in self._held_from_outside(tracked[chosen], edges, left, gradients):
            self._enter_root(address, kind)
        graph.first_garbage = len(graph.objects)
        later = {one for one in left if self._key(*one) in gradients} if gradients else set()
        for address, kind in sorted(left, key=later.__contains__):
            self._enter_root(address, kind)

    def _enter_root(self, address: int, kind: int) -> None:
        key = self._key(address, kind)
        if key and key not in self._graph.index:
            self._walker.root(key, kind if key != address or kind not in (TENSOR, NODE) else PLAIN, "")
            if address in self._leaves:
                self._walker.skip()
                return
            self._walker.exhaust()
            self._walker.release()

    def _without_new_children(self, edges: Edges, objects: Words, kinds: Words) -> set[int]:
        """Return the plain objects that lead to nothing that is not in the graph: they need no walk."""
        sound = np.flatnonzero((edges.children > 4096) & (edges.children & 7 == 0))
        places = self._memory.places(edges.children[sound])
        new = self._graph.index.by_place[places] == 0
        sound, places = sound[new], places[new]
        kinds_of = self._rows.column("kind", self._rows.rows(self._memory.data[places + 1]))
        led_to = (kinds_of != ATOM) & (kinds_of != BOUNDARY)
        leaves = kinds == PLAIN
        leaves[edges.holders[sound[led_to]]] = False
        return set(objects[leaves].tolist())

    def _key(self, address: int, kind: int) -> int:
        """Return what an object is listed by: C++'s address for tensors and nodes."""
        if kind == TENSOR:
            return self._torch.tensor(address) or address
        if kind == NODE:
            klass = self._heap.type_of(address)
            return (self._torch.node_of(address, klass) if klass is not None else 0) or address
        return address

    def _plain_gradients(self, left: Sequence[tuple[int, int]]) -> frozenset[int]:
        """Return the gradients, without a graph, of tensors among `left`: each belongs to its tensor."""
        torch = self._torch
        found = set()
        for address, kind in left:
            tensor = torch.tensor(address) if kind == TENSOR else 0
            gradient = torch.gradient(tensor) if tensor and not torch.node(tensor) else 0
            if gradient and not torch.node(gradient):
                found.add(gradient)
        return frozenset(found)

    def _held_from_outside(
        self, addresses: Words, edges: Edges, left: Sequence[tuple[int, int]], gradients: frozenset[int]
    ) -> list[tuple[int, int]]:
        """Return those that something else refers to, containers first, as the walk inside does."""
        torch = self._torch
        places = self._memory.places(addresses)
        sound = edges.children[(edges.children > 4096) & (edges.children & 7 == 0)]
        where = self._memory.places(sound)
        order = np.argsort(places, kind="stable")
        at = np.minimum(np.searchsorted(places[order], where), max(0, len(order) - 1))
        within = at[places[order][at] == where] if len(order) else at
        count = np.zeros(len(left), np.int64)
        count[order] = np.bincount(within, minlength=len(left))
        if gradients:
            count += [self._key(address, kind) in gradients for address, kind in left]
        references = self._memory.data[places] & _REFERENCES
        outside = [left[at] for at in np.flatnonzero(references > count).tolist()]

        def rank(one: tuple[int, int]) -> int:
            address, kind = one
            if kind == TENSOR:
                tensor = torch.tensor(address)
                carries = tensor and not torch.node(tensor) and torch.gradient(tensor)
                return 1 if carries else 3
            return 2 if kind == NODE else 0

        return sorted(outside, key=rank)
