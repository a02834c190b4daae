"""One breadth-first walk over another process's objects, from the same roots as `memtriage.observe.heap`.

The order of the roots, and of what each object refers to, is that of the walk inside: so both find the same
holder for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

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
from memtriage.outside.interpreter import Interpreter
from memtriage.outside.objects import Frame, Heap, RemoteType, Translate
from memtriage.outside.tensors import TorchReader
from memtriage.process.stdlib import os

MOST_OBJECTS: Final = 10_000_000
_LOOK_AT_CLOCK_EVERY: Final = 4096


@dataclass(frozen=True, slots=True)
class RemoteFrame:
    """A running function, and the name of its thread where that is not the main one."""

    frame: Frame
    thread: str | None


class RemoteGraph:
    """Objects reached by a walk. Index `i` stands for `objects[i]` everywhere.

    Attributes:
        objects: addresses: of the C++ object for tensors and nodes, of the frame for running functions.
        kinds: how each is walked (`memtriage.observe.kinds`).
        parents: index of the object through which each was first reached; -1 for a root.
        index: position by address; -1 for what is not to be entered.
        root_names: text for each root that is a module or a class.
        frames: by the address of the frame.
        tensors, nodes, modules, optimizers: indexes of these.
        checkpoints: the checkpoint of each placeholder for a saved tensor.
        saved: addresses of tensors that nodes save.
        first_unrooted, first_garbage: as in the walk inside.
        cut: why the walk is partial; None when it is whole.
    """

    def __init__(self, heap: Heap, torch: TorchReader) -> None:
        self.heap = heap
        self.torch = torch
        self.objects: list[int] = []
        self.kinds: list[int] = []
        self.parents: list[int] = []
        self.index: dict[int, int] = {}
        self.root_names: dict[int, str] = {}
        self.frames: dict[int, RemoteFrame] = {}
        self.not_searched: set[int] = set()
        self.tensors: list[int] = []
        self.nodes: list[int] = []
        self.modules: list[int] = []
        self.optimizers: list[int] = []
        self.checkpoints: dict[int, int] = {}
        self.saved: set[int] = set()
        self.first_unrooted = 0
        self.first_garbage = 0
        self.cut: str | None = None

    def type_at(self, position: int) -> RemoteType | None:
        """Return the Python class of an object; None of a C++ object without a Python one, and of a frame."""
        kind, address = self.kinds[position], self.objects[position]
        if kind == TENSOR:
            wrapper = self.torch.wrapper(address)
            return self.heap.type_of(wrapper) if wrapper else None
        if kind == NODE:
            wrapper = self.torch.node_wrapper(address)
            return self.heap.type_of(wrapper) if wrapper else None
        return None if kind == LOCALS else self.heap.type_of(address)


class Kinds:
    """How objects of each class are walked, by the address of the class."""

    def __init__(self, heap: Heap, translate: Translate) -> None:
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
            known = self.known[address] = klass.kind = self._classify(klass)
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
    """

    def __init__(
        self,
        heap: Heap,
        torch: TorchReader,
        interpreter: Interpreter,
        translate: Translate,
        pid: int,
        is_late: Callable[[], bool],
    ) -> None:
        self.graph = RemoteGraph(heap, torch)
        self._heap = heap
        self._torch = torch
        self._interpreter = interpreter
        self._kinds = Kinds(heap, translate)
        self._pid = pid
        self._is_late = is_late
        self._origin = CodeOrigin()
        self._modules: dict[str, int] = {}
        self._users: dict[int, bool] = {}
        self._library_classes: list[RemoteType] = []
        self._waiting_nodes: list[tuple[int, int]] = []
        self._waiting_optimizers: list[tuple[int, int]] = []
        self._head = 0

    def run(self) -> RemoteGraph:
        """Walk, and return the graph."""
        graph = self.graph
        tracked = self._interpreter.tracked()
        self._find_checkpoints(tracked)
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
        self._leftovers(tracked)
        return graph

    # --- roots ---

    def _module_roots(self) -> list[tuple[str, int]]:
        roots: list[tuple[str, int]] = []
        for name, module in self._interpreter.modules():
            klass = self._heap.type_of(module)
            if klass is None or not self._heap.is_a(klass, ModuleType):
                continue
            self._modules[name] = module
            self.graph.index.setdefault(module, -1)
            self.graph.index.setdefault(self._namespace(module), -1)
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
            self.graph.index.setdefault(
                self._heap.memory.word(frame.address + self._heap.layout.frame_object), -1
            )
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

    def _find_checkpoints(self, tracked: Sequence[int]) -> None:
        """Map each placeholder to its non-reentrant checkpoint, which has weak references to them."""
        heap = self._heap
        for address in tracked:
            klass = heap.type_of(address)
            if klass is None or klass.bases[0] != "torch.utils.checkpoint._CheckpointFrame":
                continue
            for reference in heap.list_items(heap.attribute(address, klass, "weak_holders")):
                placeholder = heap.memory.word(reference + heap.layout.weakref_object)
                self.graph.checkpoints[placeholder] = address

    def _root(self, address: int, kind: int, name: str) -> None:
        graph = self.graph
        position = len(graph.objects)
        graph.index[address] = position
        graph.objects.append(address)
        graph.kinds.append(kind)
        graph.parents.append(-1)
        if name:
            graph.root_names[position] = name

    def _enter_module(self, name: str, module: int) -> None:
        namespace = self._namespace(module)
        if self.graph.index.get(namespace, -1) < 0:
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
        self.graph.index.setdefault(address, -1)
        module = self._modules.get(klass.module)
        if module is not None and self._is_user(module):
            self._enter_class(klass)
        elif klass.module.partition(".")[0] != "memtriage":
            self._library_classes.append(klass)

    # --- the walk ---

    def _exhaust(self) -> None:
        graph = self.graph
        objects, kinds = graph.objects, graph.kinds
        look_at_clock = self._head
        while self._head < len(objects) and graph.cut is None:
            if self._head >= look_at_clock:
                look_at_clock = self._head + _LOOK_AT_CLOCK_EVERY
                if self._is_spent():
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
                index[child] = len(objects)
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
        graph.index[address] = len(graph.objects)
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

    def _leftovers(self, tracked: Sequence[int]) -> None:
        """Enter what C++ or an evaluation stack holds, then what only holds itself."""
        graph = self.graph
        graph.first_unrooted = len(graph.objects)
        left = []
        for address in tracked:
            kind = self._kinds.of_class(self._heap.memory.word(address + 8))
            if kind in (ATOM, BOUNDARY, KLASS):
                continue
            if self._key(address, kind) not in graph.index:
                left.append((address, kind))
        if graph.cut is not None:
            for address, kind in left:
                if kind == TENSOR:
                    graph.not_searched.add(len(graph.objects))
                    self._root(self._key(address, kind), TENSOR, "")
                    graph.tensors.append(len(graph.objects) - 1)
            graph.first_unrooted = graph.first_garbage = len(graph.objects)
            return
        gradients = self._plain_gradients(left)
        for address, kind in self._held_from_outside(left, gradients):
            self._enter_root(address, kind)
        graph.first_garbage = len(graph.objects)
        for address, kind in sorted(left, key=lambda one: self._key(*one) in gradients):
            self._enter_root(address, kind)

    def _enter_root(self, address: int, kind: int) -> None:
        key = self._key(address, kind)
        if key and key not in self.graph.index:
            self._root(key, kind if key != address or kind not in (TENSOR, NODE) else PLAIN, "")
            self._exhaust()
            self._release()

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
        self, left: Sequence[tuple[int, int]], gradients: frozenset[int]
    ) -> list[tuple[int, int]]:
        """Return those that something else refers to, containers first, as the walk inside does."""
        heap, torch = self._heap, self._torch
        count = {address: int(self._key(address, kind) in gradients) for address, kind in left}
        for address, _ in left:
            for child in heap.referents(address):
                if child in count:
                    count[child] += 1
        outside = [one for one in left if heap.memory.word(one[0]) > count[one[0]]]

        def rank(one: tuple[int, int]) -> int:
            address, kind = one
            if kind == TENSOR:
                tensor = torch.tensor(address)
                carries = tensor and not torch.node(tensor) and torch.gradient(tensor)
                return 1 if carries else 3
            return 2 if kind == NODE else 0

        return sorted(outside, key=rank)
