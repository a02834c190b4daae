"""The walk over another process's objects from what was entered, in the order of the walk inside.

If many objects wait, they are walked at once, as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from memtriage.observe.kinds import (
    ARRAY,
    ATOM,
    BOUNDARY,
    KLASS,
    LOCALS,
    MODULE,
    NODE,
    OPTIMIZER,
    PLACEHOLDER,
    PLAIN,
    TENSOR,
)
from memtriage.outside.graph import RemoteFrame, RemoteGraph
from memtriage.outside.kinds import Kinds
from memtriage.outside.loaded_modules import RemoteModules
from memtriage.outside.memory import Words
from memtriage.outside.objects import RemoteHeap, RemoteType
from memtriage.outside.references import ClassRows, References
from memtriage.outside.tensors import TorchReader
from memtriage.outside.values import Translate

MOST_OBJECTS: Final = 10_000_000
_LOOK_AT_CLOCK_EVERY: Final = 4096
_AT_ONCE: Final = 1 << 16
_FOLLOWING: Final = -1
"""A node that another one leads to, which is walked at once. Others wait until all objects were walked."""
_FEW: Final = 32
"""Objects that are walked faster one by one."""
_MANY: Final = 64
"""References that are followed faster all at once."""


class RemoteWalker:
    """Enters objects of one process, and walks what they lead to."""

    def __init__(
        self,
        heap: RemoteHeap,
        torch: TorchReader,
        modules: RemoteModules,
        translate: Translate,
        is_late: Callable[[], bool],
    ) -> None:
        self.graph = RemoteGraph(heap, torch)
        self.modules = modules
        self._kinds = Kinds(heap, translate)
        self.rows = ClassRows(heap, self._kinds.of_class)
        self.references = References(heap, self.rows)
        self.library_classes: list[RemoteType] = []
        self._heap = heap
        self._torch = torch
        self._memory = heap.memory
        self._is_late = is_late
        self._waiting_nodes: list[tuple[int, int]] = []
        self._waiting_optimizers: list[tuple[int, int]] = []
        self._head = 0

    def root(self, address: int, kind: int, name: str) -> None:
        """Begin at an object; `name` is that of a module or a class."""
        graph = self.graph
        position = len(graph.objects)
        graph.index.enter(address, position)
        graph.objects.append(address)
        graph.kinds.append(kind)
        graph.parents.append(-1)
        if name:
            graph.root_names[position] = name

    def enter_module(self, name: str, module: int) -> None:
        """Begin at what a module has."""
        namespace = self.modules.namespace(module)
        if not self.graph.index.is_entered(namespace):
            self.root(namespace, PLAIN, name)

    def enter_frame(self, frame: RemoteFrame) -> None:
        """Begin at the variables of a running function."""
        address = frame.frame.address
        self.root(address, LOCALS, "")
        self.graph.frames[address] = frame

    def enter_class(self, klass: RemoteType) -> None:
        """Begin at a class."""
        self.root(klass.address, KLASS, self.modules.name_of_class(klass))

    def _meet_class(self, address: int) -> None:
        klass = self._heap.class_at(address)
        if klass is None:
            return
        self.graph.index.fence(address)
        module = self.modules.of_class(klass)
        if module is not None and self.modules.is_user(module):
            self.enter_class(klass)
        elif klass.module.partition(".")[0] != "memtriage":
            self.library_classes.append(klass)

    def exhaust(self) -> None:
        """Walk on until nothing waits."""
        graph = self.graph
        while self._head < len(graph.objects) and graph.cut is None:
            end = min(len(graph.objects), self._head + _AT_ONCE)
            if end - self._head < _FEW:
                self._walk_one_by_one(end)
                continue
            kinds = np.array(graph.kinds[self._head : end], np.int64)
            several, nodes = kinds != LOCALS, np.flatnonzero(kinds == NODE)
            several[nodes] = ~self._torch.read_alone(
                np.array(graph.objects[self._head : end], np.int64)[nodes]
            )
            turns = self._head + 1 + np.flatnonzero(several[1:] != several[:-1])
            start = self._head
            for first, last in zip([start, *turns.tolist()], [*turns.tolist(), end], strict=True):
                if last - first < _FEW or not several[first - start]:
                    self._walk_one_by_one(last)
                elif not self._is_spent():
                    self._walk_at_once(last, kinds[first - start : last - start])
                if graph.cut is not None:
                    return

    def _walk_one_by_one(self, end: int) -> None:
        graph = self.graph
        objects, kinds = graph.objects, graph.kinds
        while self._head < end:
            if self._head % _LOOK_AT_CLOCK_EVERY == 0 and self._is_spent():
                return
            head, address = self._head, objects[self._head]
            kind = kinds[head]
            self._head += 1
            if kind == TENSOR:
                self._leave_tensor(address, head)
            elif kind == NODE:
                self._leave_node(address, head)
            elif kind == LOCALS:
                values = [value for _, value in graph.frames[address].frame.variables]
                self._enter_all(values, head)
            else:
                if kind == MODULE:
                    graph.modules.append(head)
                elif kind == OPTIMIZER:
                    graph.optimizers.append(head)
                self._enter_all(self._referents(address, kind), head)

    def _walk_at_once(self, end: int, kinds: Words) -> None:
        """Walk the objects up to a position, none of which is a frame or a node that is read alone."""
        graph, first = self.graph, self._head
        objects = np.array(graph.objects[first:end], np.int64)
        self._head = end
        graph.modules += (first + np.flatnonzero(kinds == MODULE)).tolist()
        graph.optimizers += (first + np.flatnonzero(kinds == OPTIMIZER)).tolist()
        is_tensor = kinds == TENSOR
        tensors = np.flatnonzero(is_tensor)
        odd = np.flatnonzero((kinds == ARRAY) | (kinds == PLACEHOLDER))
        python = objects.copy()
        python[odd] = 0
        parts: list[tuple[int, Words, Words, int]] = []  # number of the part, children, holders, kind
        nodes = np.flatnonzero(kinds == NODE)
        if len(nodes):
            python[nodes] = 0
            graph.nodes += (first + nodes).tolist()
            for number, (part, children, which) in enumerate(self._torch.node_parts(objects[nodes])):
                there = np.flatnonzero(children)
                if part == "saved":
                    graph.saved.update(children[there].tolist())
                kind = _FOLLOWING if part == "next" else TENSOR
                parts.append((number, children[there], nodes[which[there]], kind))
        if len(tensors):
            graph.tensors += (first + tensors).tolist()
            parts_of = self._torch.tensor_parts(objects[tensors])
            python[tensors] = parts_of.wrappers
            for number, children, kind in (
                (1, parts_of.nodes, NODE), (2, parts_of.gradients, TENSOR), (3, parts_of.bases, TENSOR)
            ):  # fmt: skip
                there = np.flatnonzero(children)
                parts.append((number, children[there], tensors[there], kind))
        whole = np.flatnonzero(python)
        rows = self.rows.rows(self._memory.data[self._memory.places(python[whole]) + 1])
        edges = self.references.of(python[whole], rows)
        parts.append((0, edges.children, whole[edges.holders], PLAIN))
        for at in odd.tolist():
            found = self._referents(int(objects[at]), int(kinds[at]))
            children = np.array([child for child in found if child < 1 << 62], np.int64)
            parts.append((0, children, np.full(len(children), at), PLAIN))
        children = np.concatenate([part[1] for part in parts])
        holders = np.concatenate([part[2] for part in parts])
        sorts = np.concatenate([np.full(len(part[1]), part[3]) for part in parts])
        if len(parts) > 1:
            numbers = np.concatenate([np.full(len(part[1]), part[0]) for part in parts])
            order = np.lexsort((numbers, holders))
            children, holders, sorts = children[order], holders[order], sorts[order]
        self._enter_at_once(children, first + holders, sorts)

    def _enter_at_once(self, children: Words, holders: Words, sorts: Words) -> None:
        """Enter what is new among references, in their order.

        Args:
            children: addresses.
            holders: position of what refers to each.
            sorts: `TENSOR`, `NODE` or `_FOLLOWING` where an address is that of the C++ object, else `PLAIN`.
        """
        index = self.graph.index.by_place
        sound = np.flatnonzero((children > 4096) & (children & 7 == 0))
        places = self._memory.places(children[sound])
        new = index[places] == 0
        chosen, places = sound[new], places[new]
        children, holders, sorts = children[chosen], holders[chosen], sorts[chosen]
        following = sorts == _FOLLOWING
        kinds = np.where(following, NODE, sorts)
        python = np.flatnonzero(sorts == PLAIN)
        rows = self.rows.rows(self._memory.data[places[python] + 1])
        kinds[python] = self.rows.column("kind", rows)
        wrapped = python[kinds[python] == TENSOR]
        if len(wrapped):
            children[wrapped] = self._torch.tensors(places[wrapped])
            places[wrapped] = self._memory.places(children[wrapped])
        apart = (kinds == KLASS) | (kinds == OPTIMIZER) | ((kinds == NODE) & ~following)
        if apart.any():
            chosen = np.flatnonzero(apart)
            self._enter_apart(children[chosen], holders[chosen], kinds[chosen], sorts[chosen])
        taken = np.flatnonzero((kinds != ATOM) & (kinds != BOUNDARY) & ~apart & (places > 0))
        taken = taken[index[places[taken]] == 0]
        where, order = places[taken], np.arange(1, len(taken) + 1, dtype=np.int32)
        index[where[::-1]] = order[::-1]  # of equal places the first one counts
        once = index[where] == order
        taken, where = taken[once], where[once]
        graph = self.graph
        index[where] = len(graph.objects) + 1 + np.arange(len(where), dtype=np.int32)
        graph.objects += children[taken].tolist()
        graph.kinds += kinds[taken].tolist()
        graph.parents += holders[taken].tolist()

    def _enter_apart(self, children: Words, holders: Words, kinds: Words, sorts: Words) -> None:
        """Meet classes, and put off nodes and optimizers."""
        for child, holder, kind, sort in zip(
            children.tolist(), holders.tolist(), kinds.tolist(), sorts.tolist(), strict=True
        ):
            if kind == KLASS:
                if child not in self.graph.index:
                    self._meet_class(child)
            elif kind == OPTIMIZER:
                self._waiting_optimizers.append((child, holder))
            elif sort == NODE:
                self._waiting_nodes.append((child, holder))
            else:
                self._enter_node_object(child, holder, False)

    def _referents(self, address: int, kind: int) -> list[int]:
        heap = self._heap
        if kind == ARRAY:
            base = heap.memory.word(address + heap.layout.array_base)
            return [base] if base else []
        found = heap.referents(address)
        if kind == PLACEHOLDER and address in self.graph.checkpoints:
            found = [*found, self.graph.checkpoints[address]]
        return found

    def _enter_all(self, children: Sequence[int], holder: int, from_node: bool = False) -> None:
        """Enter Python objects that an object refers to. The hot loop."""
        if len(children) > _MANY and not from_node:
            found = np.array([child for child in children if child < 1 << 62], np.int64)
            self._enter_at_once(found, np.full(len(found), holder), np.full(len(found), PLAIN))
            return
        graph, known, of_class = self.graph, self._kinds.known, self._kinds.of_class
        word, index = self._heap.memory.word, self.graph.index
        objects, kinds, parents = graph.objects, graph.kinds, graph.parents
        for child in children:
            if not child or child in index or child & 7:
                continue
            klass = word(child + 8)
            kind = known.get(klass)
            if kind is None:
                kind = of_class(klass)
            if kind in (ATOM, BOUNDARY):
                continue
            if kind == PLAIN:
                index.enter(child, len(objects))
                objects.append(child)
                kinds.append(PLAIN)
                parents.append(holder)
            elif kind == KLASS:
                self._meet_class(child)
            elif kind == TENSOR:
                self._enter_tensor(self._torch.tensor(child), holder)
            elif kind == OPTIMIZER:
                self._waiting_optimizers.append((child, holder))
            elif kind == NODE:
                self._enter_node_object(child, holder, from_node)
            else:
                self._enter(child, kind, holder)

    def _enter(self, address: int, kind: int, holder: int) -> None:
        graph = self.graph
        if address in graph.index:
            return
        graph.index.enter(address, len(graph.objects))
        graph.objects.append(address)
        graph.kinds.append(kind)
        graph.parents.append(holder)

    def _enter_tensor(self, tensor: int, holder: int) -> None:
        if tensor:
            self._enter(tensor, TENSOR, holder)

    def _enter_node_object(self, wrapper: int, holder: int, from_node: bool) -> None:
        klass = self._heap.type_of(wrapper)
        node = 0 if klass is None else self._torch.node_of(wrapper, klass)
        if not node:
            self._enter(wrapper, PLAIN, holder)  # a context that no backward will need
        elif from_node:
            self._enter(node, NODE, holder)
        elif node not in self.graph.index:
            self._waiting_nodes.append((node, holder))

    def _leave_tensor(self, tensor: int, position: int) -> None:
        torch = self._torch
        self.graph.tensors.append(position)
        wrapper = torch.wrapper(tensor)
        if wrapper:
            self._enter_all(self._heap.referents(wrapper), position)
        node = torch.node(tensor)
        if node and node not in self.graph.index:
            self._waiting_nodes.append((node, position))
        self._enter_tensor(torch.gradient(tensor), position)
        self._enter_tensor(torch.base(tensor), position)

    def _leave_node(self, node: int, position: int) -> None:
        torch = self._torch
        self.graph.nodes.append(position)
        for following in torch.next_nodes(node):
            self._enter(following, NODE, position)
        for saved in torch.saved(node):
            if saved.tensor:
                self.graph.saved.add(saved.tensor)
                self._enter_tensor(saved.tensor, position)
            else:
                klass = self._heap.type_of(saved.packed)
                if klass is not None and "torch.Tensor" in klass.bases:  # the hook returned what it was given
                    self.graph.saved.add(torch.tensor(saved.packed))
                self._enter_all([saved.packed], position, from_node=True)
        wrapper = torch.node_wrapper(node)
        if wrapper:
            self._enter_all(self._heap.referents(wrapper), position, from_node=True)
        self._enter_tensor(torch.leaf(node), position)

    def release(self, *, graphs: bool = True) -> None:
        """Enter what has waited, graphs before optimizers, and walk what they lead to."""
        while (graphs and self._waiting_nodes) or self._waiting_optimizers:
            kind = NODE if graphs and self._waiting_nodes else OPTIMIZER
            waiting = self._waiting_nodes if kind == NODE else self._waiting_optimizers
            for address, holder in waiting:
                self._enter(address, kind, holder)
            waiting.clear()
            self.exhaust()

    def _is_spent(self) -> bool:
        graph = self.graph
        if len(graph.objects) > MOST_OBJECTS:
            graph.cut = f"searched {len(graph.objects):,} objects, the most that a census from outside takes"
        elif self._is_late():
            graph.cut = f"searched {len(graph.objects):,} objects until the time was over"
        return graph.cut is not None

    def skip(self) -> None:
        """Take what was entered as walked: it leads to nothing that is not in the graph."""
        self._head = len(self.graph.objects)
