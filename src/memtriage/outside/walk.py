"""One breadth-first walk over another process's objects, from the same roots as `memtriage.observe.heap`.

The order of the roots, and of what each object refers to, is that of the walk inside: so both find the same
holder for each tensor. Where many objects wait, they are walked at once, as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final

import numpy as np

from memtriage.model.code_origin import is_installed
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
    KindTable,
)
from memtriage.observe.origin import CodeOrigin
from memtriage.outside.graph import RemoteFrame, RemoteGraph
from memtriage.outside.interpreter import RemoteInterpreter
from memtriage.outside.memory import Words
from memtriage.outside.objects import RemoteHeap, RemoteType
from memtriage.outside.references import ClassRows, Edges, References
from memtriage.outside.tensors import TorchReader
from memtriage.outside.values import Translate
from memtriage.process.stdlib import os

MOST_OBJECTS: Final = 10_000_000
_LOOK_AT_CLOCK_EVERY: Final = 4096
_AT_ONCE: Final = 1 << 16
_FEW: Final = 32
"""Objects that are walked faster one by one."""
_MANY: Final = 64
"""References that are followed faster all at once."""
_REFERENCES: Final = 0xFFFFFFFF
"""Bits of an object's count of references; what is above them marks immortal objects since Python 3.12."""


class Kinds:
    """How objects of each class are walked, by the address of the class."""

    def __init__(self, heap: RemoteHeap, translate: Translate) -> None:
        self._heap = heap
        self.known: dict[int, int] = {}
        table = KindTable()
        for own, kind in table.known.items():
            address = translate(own)
            if address is not None and kind == ATOM:
                self.known[address] = ATOM
        table.clear()

    def of_class(self, address: int) -> int:
        """Return the kind of the instances of a class; `ATOM` where there is no class."""
        known = self.known.get(address)
        if known is None:
            klass = self._heap.class_at(address)
            if klass is None:
                return ATOM
            if klass.kind < 0:
                klass.kind = self._classify(klass)
            known = self.known[address] = klass.kind
        return known

    def _classify(self, klass: RemoteType) -> int:
        bases = klass.bases
        if "torch.Tensor" in bases:
            return TENSOR
        if klass.is_class:
            return KLASS
        first, second, *_ = [*klass.module.split("."), "", ""]
        if self._heap.is_a(klass, ModuleType) or (first == "memtriage" and second != "treat"):
            return BOUNDARY
        if self._heap.declares(klass, "next_functions", "_register_hook_dict"):
            return NODE
        if bases[0] == "torch.utils.checkpoint._Holder":
            return PLACEHOLDER
        if "torch.nn.modules.module.Module" in bases:
            return MODULE
        if "torch.optim.optimizer.Optimizer" in bases or (
            "Optim" in klass.name and self._heap.declares(klass, "step", "zero_grad")
        ):
            return OPTIMIZER
        return ARRAY if "numpy.ndarray" in bases else PLAIN


class RemoteWalk:
    """Walks one process once.

    Args:
        heap, torch, interpreter: of the process.
        translate: from an address of this process to that of the same thing there.
        pid: the process.
        is_late: whether the time for the walk is over.
        before: the objects that the collector followed at an earlier reading.

    Attributes:
        tracked: those that it follows now.
    """

    def __init__(
        self,
        heap: RemoteHeap,
        torch: TorchReader,
        interpreter: RemoteInterpreter,
        translate: Translate,
        pid: int,
        is_late: Callable[[], bool],
        before: Words | None = None,
    ) -> None:
        self.tracked = np.zeros(0, np.int64)
        self._before = before
        self.graph = RemoteGraph(heap, torch)
        self._heap = heap
        self._torch = torch
        self._interpreter = interpreter
        self._memory = heap.memory
        self._kinds = Kinds(heap, translate)
        self._rows = ClassRows(heap, self._kinds.of_class)
        self._references = References(heap, self._rows)
        self._pid = pid
        self._is_late = is_late
        self._origin = CodeOrigin()
        self._modules: dict[str, int] = {}
        self._users: dict[int, bool] = {}
        self._library_classes: list[RemoteType] = []
        self._waiting_nodes: list[tuple[int, int]] = []
        self._waiting_optimizers: list[tuple[int, int]] = []
        self._leaves: set[int] = set()
        self._head = 0

    def run(self) -> RemoteGraph:
        """Walk, and return the graph."""
        graph = self.graph
        tracked = self.tracked = self._interpreter.tracked(self._before)
        rows = self._rows.rows(self._memory.data[self._memory.places(tracked) + 1])
        self._find_checkpoints(tracked, rows)
        modules = self._module_roots()
        user = [(name, module) for name, module in modules if self._is_user(module)]
        for name, module in user:
            self._enter_module(name, module)
        self._exhaust()
        frames = self._running()
        for users in (True, False):
            for found in frames:
                if self._origin_is_user(found.frame.file) is users:
                    self._root(found.frame.address, LOCALS, "")
                    graph.frames[found.frame.address] = found
            self._exhaust()
        self._release()
        known = {module for _, module in user}
        for name, module in modules:
            if module not in known:
                self._enter_module(name, module)
        self._exhaust()
        for klass in self._library_classes:
            self._enter_class(klass)
        self._exhaust()
        self._release()
        self._leftovers(tracked, rows)
        return graph

    # --- roots ---

    def _module_roots(self) -> list[tuple[str, int]]:
        roots: list[tuple[str, int]] = []
        for name, module in self._interpreter.modules():
            klass = self._heap.type_of(module)
            if klass is None or not self._heap.is_a(klass, ModuleType):
                continue
            self._modules[name] = module
            self.graph.index.fence(module)
            self.graph.index.fence(self._namespace(module))
            if name == "__main__":
                roots.insert(0, (self._main_name(module), module))
            elif name != "__mp_main__" and name.partition(".")[0] != "memtriage":
                roots.append((name, module))
        return roots

    def _namespace(self, module: int) -> int:
        return self._heap.memory.word(module + self._heap.layout.module_dict)

    def _module_variable(self, module: int, name: str) -> str | None:
        """A module's `__name__` or `__file__`."""
        return self._heap.text(self._heap.dict_value(self._namespace(module), name))

    def _main_name(self, module: int) -> str:
        file = self._module_variable(module, "__file__")
        if not file:
            return "__main__"
        stem = os.path.splitext(os.path.basename(file))[0]
        return os.path.basename(os.path.dirname(file)) or stem if stem == "__main__" else stem

    def _is_user(self, module: int) -> bool:
        known = self._users.get(module)
        if known is None:
            known = self._users[module] = self._has_user_file(module)
        return known

    def _has_user_file(self, module: int) -> bool:
        name = self._module_variable(module, "__name__") or ""
        if name == "__main__":
            return True
        package = self._modules.get(name.partition(".")[0], module)
        return all(
            self._origin_is_user(self._module_variable(part, "__file__")) for part in (module, package)
        )

    def _origin_is_user(self, file: str | None) -> bool:
        return file is not None and not is_installed(file) and self._origin.is_user_file(file)

    def _running(self) -> list[RemoteFrame]:
        names = self._thread_names()
        found = []
        for ident, frame in self._interpreter.frames(self._pid):
            if self._origin.is_own_file(frame.file):
                continue
            self.graph.index.fence(self._memory.word(frame.address + self._heap.layout.frame_object))
            thread = None if ident is None else names.get(ident, f"id {ident}")
            found.append(RemoteFrame(frame, thread))
        return found

    def _thread_names(self) -> dict[int, str]:
        heap = self._heap
        threading = self._modules.get("threading")
        if threading is None:
            return {}
        names = {}
        for key, thread in heap.dict_items(heap.dict_value(self._namespace(threading), "_active")):
            klass, ident = heap.type_of(thread), heap.number(key)
            if klass is not None and ident is not None:
                name = heap.text(heap.attribute(thread, klass, "_name"))
                if name is not None:
                    names[ident] = name
        return names

    def _find_checkpoints(self, tracked: Words, rows: Words) -> None:
        """Map each placeholder to its non-reentrant checkpoint, which has weak references to them."""
        heap = self._heap
        for row in np.unique(rows).tolist():
            klass = self._rows.class_at(row)
            if klass is None or klass.bases[0] != "torch.utils.checkpoint._CheckpointFrame":
                continue
            frames = [(address, klass) for address in tracked[rows == row].tolist()]
            for address, klass in frames:
                for reference in heap.list_items(heap.attribute(address, klass, "weak_holders")):
                    placeholder = heap.memory.word(reference + heap.layout.weakref_object)
                    self.graph.checkpoints[placeholder] = address

    def _root(self, address: int, kind: int, name: str) -> None:
        graph = self.graph
        position = len(graph.objects)
        graph.index.enter(address, position)
        graph.objects.append(address)
        graph.kinds.append(kind)
        graph.parents.append(-1)
        if name:
            graph.root_names[position] = name

    def _enter_module(self, name: str, module: int) -> None:
        namespace = self._namespace(module)
        if not self.graph.index.is_entered(namespace):
            self._root(namespace, PLAIN, name)

    def _enter_class(self, klass: RemoteType) -> None:
        module = klass.module
        if module == "__main__" and (main := self._modules.get("__main__")) is not None:
            module = self._main_name(main)
        self._root(klass.address, KLASS, f"{module}.{klass.qualified_name}")

    def _meet_class(self, address: int) -> None:
        klass = self._heap.class_at(address)
        if klass is None:
            return
        self.graph.index.fence(address)
        module = self._modules.get(klass.module)
        if module is not None and self._is_user(module):
            self._enter_class(klass)
        elif klass.module.partition(".")[0] != "memtriage":
            self._library_classes.append(klass)

    # --- the walk ---

    def _exhaust(self) -> None:
        """Walk on until nothing waits."""
        graph = self.graph
        while self._head < len(graph.objects) and graph.cut is None:
            end = min(len(graph.objects), self._head + _AT_ONCE)
            if end - self._head < _FEW:
                self._walk_one_by_one(end)
                continue
            kinds = np.array(graph.kinds[self._head : end], np.int64)
            several = (kinds != NODE) & (kinds != LOCALS)
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
        """Walk the objects up to a position, none of which is a node or a frame."""
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
        rows = self._rows.rows(self._memory.data[self._memory.places(python[whole]) + 1])
        edges = self._references.of(python[whole], rows)
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
            order = np.argsort(holders * 4 + numbers, kind="stable")
            children, holders, sorts = children[order], holders[order], sorts[order]
        self._enter_at_once(children, first + holders, sorts)

    def _enter_at_once(self, children: Words, holders: Words, sorts: Words) -> None:
        """Enter what is new among references, in their order.

        Args:
            children: addresses.
            holders: position of what refers to each.
            sorts: `TENSOR` or `NODE` where an address is that of the C++ object, else `PLAIN`.
        """
        index = self.graph.index.by_place
        sound = np.flatnonzero((children > 4096) & (children & 7 == 0))
        places = self._memory.places(children[sound])
        new = index[places] == 0
        chosen, places = sound[new], places[new]
        children, holders, sorts = children[chosen], holders[chosen], sorts[chosen]
        kinds = sorts.copy()
        python = np.flatnonzero(sorts == PLAIN)
        rows = self._rows.rows(self._memory.data[places[python] + 1])
        kinds[python] = self._rows.column("kind", rows)
        wrapped = python[kinds[python] == TENSOR]
        if len(wrapped):
            children[wrapped] = self._torch.tensors(places[wrapped])
            places[wrapped] = self._memory.places(children[wrapped])
        apart = (kinds == KLASS) | (kinds == OPTIMIZER) | (kinds == NODE)
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
        klass = heap.type_of(address)
        if klass is not None and heap.is_a(klass, list, dict):
            heap.renew(np.array([address], np.int64))
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

    def _release(self) -> None:
        """Enter what has waited, graphs before optimizers, and walk what they lead to."""
        while self._waiting_nodes or self._waiting_optimizers:
            kind = NODE if self._waiting_nodes else OPTIMIZER
            waiting = self._waiting_nodes or self._waiting_optimizers
            for address, holder in waiting:
                self._enter(address, kind, holder)
            waiting.clear()
            self._exhaust()

    def _is_spent(self) -> bool:
        graph = self.graph
        if len(graph.objects) > MOST_OBJECTS:
            graph.cut = f"searched {len(graph.objects):,} objects, the most that a census from outside takes"
        elif self._is_late():
            graph.cut = f"searched {len(graph.objects):,} objects until the time was over"
        return graph.cut is not None

    # --- what no root leads to ---

    def _leftovers(self, tracked: Words, rows: Words) -> None:
        """Enter what C++ or an evaluation stack holds, then what only holds itself."""
        graph = self.graph
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
                    self._root(self._key(address, kind), TENSOR, "")
                    graph.tensors.append(len(graph.objects) - 1)
            graph.first_unrooted = graph.first_garbage = len(graph.objects)
            return
        gradients = self._plain_gradients(left)
        edges = self._references.of(tracked[chosen], rows[chosen])
        self._leaves = self._without_new_children(edges, tracked[chosen], kinds[chosen])
        for address, kind in self._held_from_outside(tracked[chosen], edges, left, gradients):
            self._enter_root(address, kind)
        graph.first_garbage = len(graph.objects)
        last = [one for one in left if self._key(*one) in gradients] if gradients else []
        for address, kind in [*(one for one in left if one not in set(last)), *last]:
            self._enter_root(address, kind)

    def _enter_root(self, address: int, kind: int) -> None:
        key = self._key(address, kind)
        if key and key not in self.graph.index:
            self._root(key, kind if key != address or kind not in (TENSOR, NODE) else PLAIN, "")
            if address in self._leaves:
                self._head = len(self.graph.objects)
                return
            self._exhaust()
            self._release()

    def _without_new_children(self, edges: Edges, objects: Words, kinds: Words) -> set[int]:
        """Return the plain objects that lead to nothing that is not in the graph: they need no walk."""
        sound = np.flatnonzero((edges.children > 4096) & (edges.children & 7 == 0))
        places = self._memory.places(edges.children[sound])
        new = self.graph.index.by_place[places] == 0
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
