"""The steps of one breadth-first walk: enter roots, follow what they lead to, stop at the budget.

`heap.py` and `library_search.py` decide which roots are entered, and in which order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, Final, TypeAlias

from memtriage.observe.classes import module_of, qualified_name_of, variables_of
from memtriage.observe.edges import edges, tensor_referents
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import (
    ARRAY,
    ATOM,
    BOUNDARY,
    KLASS,
    MODULE,
    NODE,
    OPTIMIZER,
    PLAIN,
    TENSOR,
    FrameLocals,
)
from memtriage.observe.loaded_modules import is_user_module, module_name_of
from memtriage.observe.objects import Listing, tracked_objects
from memtriage.observe.origin import CodeOrigin
from memtriage.process.stdlib import gc, time


@dataclass(frozen=True, slots=True)
class CensusBudget:
    """How much of a program one walk looks through. If there is more, the walk is partial and says so.

    Attributes:
        objects: most objects walked. A million take a second, and about 120 MB of host memory meanwhile.
        seconds: most processor time of a walk; the program waits meanwhile.
        wide: if there are more than half of `objects` to walk, containers with at least this many entries are
            walked last: a data set kept as Python objects must not hide the model.
        wide_seconds: most time for those containers.
    """

    objects: int = 1_000_000
    seconds: float = 5.0
    wide: int = 10_000
    wide_seconds: float = 1.0


ThreadFrame: TypeAlias = tuple[str | None, FrameType]
"""A frame, and the name of its thread if that is not the main one."""

BUDGET = CensusBudget()
_LOOK_AT_CLOCK_EVERY: Final = 4096


class HeapWalker:
    """Fills a graph. No method enters an object again, or one that was fenced.

    Args:
        graph: an empty one.
        budget: when to stop; by default `BUDGET`.

    Attributes:
        everything: the tracked objects, as they were before the walk.
        library_classes: classes of libraries that were met, as roots for later.
    """

    def __init__(self, graph: HeapGraph, budget: CensusBudget | None = None) -> None:
        self.budget = budget = budget or BUDGET
        self.deadline_s = time.thread_time() + budget.seconds
        self.graph = graph
        self.origin = CodeOrigin()
        self.kinds = graph.kinds
        self.reader = graph.reader
        self.head = 0
        self.library_classes: list[type] = []
        self.waiting_nodes: list[tuple[Any, int]] = []
        self.waiting_optimizers: list[tuple[Any, int]] = []
        self.everything = Listing(tracked_objects())
        graph.tracked = len(self.everything.objects)
        large = graph.tracked > budget.objects // 2
        self.widest = budget.wide if large else sys.maxsize
        self.wide: list[int] = []
        self.reader.find_checkpoints(self.everything)
        own_parts = (*vars(graph).values(), *vars(self).values(), *vars(self.kinds).values())
        listed = self.everything
        own_parts += (vars(graph), vars(listed), *vars(listed).values(), *listed.by_type.values())
        for own in own_parts:
            self.fence(own)

    def fence(self, obj: Any) -> None:
        """Keep the walk from entering an object that is a separate root, or not wanted."""
        self.graph.index.setdefault(id(obj), -1)

    def root(self, obj: Any, name: str) -> None:
        """Enter an object as a root, under a name."""
        graph = self.graph
        self.kinds.classify(obj)
        graph.index[id(obj)] = position = len(graph.objects)
        graph.objects.append(obj)
        graph.parents.append(-1)
        graph.root_names[position] = name

    def enter_module(self, name: str, module: ModuleType) -> None:
        """Enter a module's variables as a root."""
        namespace = variables_of(module)
        if self.graph.index[id(namespace)] < 0:  # else it was entered under another name (`os.path`)
            self.root(namespace, name)

    def enter_frame(self, frame: ThreadFrame) -> None:
        """Enter the variables of a running or ended function as a root."""
        thread, running = frame
        self.root(FrameLocals(running, thread), "")

    def enter_class(self, klass: type) -> None:
        """Enter a class as a root."""
        name = f"{module_name_of(klass)}.{qualified_name_of(klass)}"
        self.root(klass, name)

    def exhaust(self) -> None:
        """Continue until the queue is empty. The hot loop: only local names, one dict probe per edge."""
        graph, kinds = self.graph, self.kinds
        objects, parents, index, known = graph.objects, graph.parents, graph.index, kinds.known
        referents = gc.get_referents
        head = self.head
        size = len(objects)
        look_at_clock = head + _LOOK_AT_CLOCK_EVERY
        while head < size and graph.cut is None:
            if head >= look_at_clock:
                look_at_clock = head + _LOOK_AT_CLOCK_EVERY
                if self._is_spent():
                    break
            obj = objects[head]
            kind = known[id(type(obj))]
            children = referents(obj) if kind == PLAIN else self.children(obj, kind, head)
            if len(children) > self.widest and kind == PLAIN:
                self.wide.append(head)
                head += 1
                continue
            for child in children:
                try:
                    child_kind = known[id(type(child))]
                except KeyError:
                    child_kind = kinds.classify(child)
                if child_kind == ATOM:  # half of all edges are a dict's string keys
                    continue
                key = id(child)
                if key in index or child_kind == BOUNDARY:
                    continue
                if child_kind >= KLASS:
                    if child_kind == KLASS:
                        self._meet_class(child)
                        size = len(objects)
                        continue
                    if child_kind == OPTIMIZER:
                        self.waiting_optimizers.append((child, head))
                        continue
                    if kind != NODE:
                        self.waiting_nodes.append((child, head))
                        continue
                index[key] = size
                size += 1
                objects.append(child)
                parents.append(head)
            head += 1
        self.head = head

    def _is_spent(self) -> bool:
        """Whether the budget is used up, after which nothing more is walked."""
        graph, budget = self.graph, self.budget
        if graph.cut is None:
            walked = f"{len(graph.objects):,} of more than {graph.tracked:,} objects"
            if len(graph.objects) > budget.objects:
                graph.cut = f"searched {walked}, the most that a census takes"
            elif time.thread_time() > self.deadline_s:
                graph.cut = f"searched {walked}, in the longest time that a census takes"
        return graph.cut is not None

    def enter_wide(self) -> None:
        """Walk the containers that were postponed because they have very many entries."""
        self.widest = sys.maxsize
        graph = self.graph
        if self.wide:
            self.deadline_s = min(self.deadline_s, time.thread_time() + self.budget.wide_seconds)
        for position in self.wide:
            children = gc.get_referents(graph.objects[position])
            for start in range(0, len(children), _LOOK_AT_CLOCK_EVERY):
                if self._is_spent():
                    return
                self.enter_children(children[start : start + _LOOK_AT_CLOCK_EVERY], position)
            self.exhaust()
        self.release()

    def enter_children(self, children: Iterable[Any], position: int) -> None:
        """Enter what the object at a position leads to, now or later."""
        for child in children:
            kind = self.kinds[type(child)]
            if kind in (ATOM, BOUNDARY) or id(child) in self.graph.index:
                continue
            if kind == KLASS:
                self._meet_class(child)
            elif kind == OPTIMIZER:
                self.waiting_optimizers.append((child, position))
            elif kind == NODE:
                self.waiting_nodes.append((child, position))
            else:
                self.enter(child, position)

    def enter(self, obj: Any, holder: int) -> None:
        """Enter an object that the one at a position leads to."""
        graph = self.graph
        graph.index[id(obj)] = len(graph.objects)
        graph.objects.append(obj)
        graph.parents.append(holder)

    def rescue(self) -> None:
        """Enter the tensors, modules and optimizers that a partial walk has not reached.

        So the sizes are complete for tensors that have Python objects, although the holders are not.
        """
        graph, kinds = self.graph, self.kinds
        wanted = frozenset((TENSOR, MODULE, OPTIMIZER))
        for position in range(self.head, len(graph.objects)):
            kind = kinds[type(graph.objects[position])]
            if kind in wanted:
                self.children(graph.objects[position], kind, position)
        for obj in self.everything.objects:
            kind = kinds[type(obj)]
            if kind in wanted and graph.index.get(id(obj), -1) < 0:
                graph.not_searched.add(len(graph.objects))
                self.root(obj, "")
                self.children(obj, kind, len(graph.objects) - 1)
        self.head = len(graph.objects)
        self.everything.clear()

    def release(self, *, graphs: bool = True) -> None:
        """Enter what has waited, graphs before optimizers, and walk what it leads to."""
        graph = self.graph
        while (graphs and self.waiting_nodes) or self.waiting_optimizers:
            waiting = (self.waiting_nodes if graphs else None) or self.waiting_optimizers
            for obj, holder in waiting:
                if id(obj) not in graph.index:
                    self.enter(obj, holder)
            waiting.clear()
            self.exhaust()

    def _meet_class(self, klass: type) -> None:
        self.fence(klass)
        name = module_of(klass)
        module = sys.modules.get(name)
        if type(module) is ModuleType and is_user_module(module, self.origin):
            self.enter_class(klass)
        elif name.partition(".")[0] != "memtriage":
            self.library_classes.append(klass)

    def children(self, obj: Any, kind: int, position: int) -> list[Any]:
        """Return what an object refers to; note its position if it is a tensor, node, module or the like."""
        graph = self.graph
        if kind == TENSOR:
            graph.tensors.append(position)
            return tensor_referents(obj)
        if kind == NODE:
            graph.nodes.append(position)
            return self.reader.referents(obj)
        if kind == MODULE:
            graph.modules.append(position)
        elif kind == OPTIMIZER:
            graph.optimizers.append(position)
        elif kind == ARRAY:
            graph.arrays.append(position)
        return edges(obj, kind, self.reader)
