"""One breadth-first walk over Python objects and autograd nodes, from ordered roots.

The result is a `HeapGraph` that **holds every object it lists**: it must be dropped before anything is
measured or the watched script goes on (`with Walk() as graph:`). Nothing is called that could run user code,
except attribute access on tensors, which is that of `torch.Tensor` itself (`observe.tensors.plain`).

Roots, in this order; a later one never takes what an earlier one reached:

1. the modules and classes of the user's program,
2. the frames of all threads, the user's functions first,
3. library modules and library classes,
4. what only C++ or the interpreter's own stack keeps alive,
5. what nothing keeps alive: garbage cycles that no collection has freed yet.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, Final

from memtriage.observe import autograd
from memtriage.observe.classes import module_of, qualified_name_of, variables_of
from memtriage.observe.edges import edges, tensor_referents
from memtriage.observe.frames import running_frames
from memtriage.observe.kinds import (
    ARRAY,
    ATOM,
    BOUNDARY,
    FUTURE,
    KLASS,
    LOCALS,
    MODULE,
    NODE,
    OPTIMIZER,
    PLACEHOLDER,
    PLAIN,
    SAVED,
    TENSOR,
    FrameLocals,
    KindTable,
)
from memtriage.observe.objects import tracked_objects
from memtriage.observe.origin import CodeOrigin
from memtriage.observe.tensors import plain, undisturbed
from memtriage.process.collector import pause_collector, resume_collector
from memtriage.process.stdlib import gc, os, time


@dataclass(frozen=True, slots=True)
class CensusBudget:
    """How much of a program one walk looks through. Beyond it the walk is partial, and says so.

    Attributes:
        objects: the most objects that are walked. A million take about 120 MB of host memory for the walk's
            duration, and a second.
        seconds: of the processor, the longest that a walk may take; the program stands still meanwhile.
        wide: entries from which a container is walked last, where there is more than half of `objects` to
            walk: a data set kept as Python objects must not hide the model.
        wide_seconds: the longest that those containers take.
    """

    objects: int = 1_000_000
    seconds: float = 5.0
    wide: int = 10_000
    wide_seconds: float = 1.0


BUDGET = CensusBudget()


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """How far a search back goes, from what the program's own variables do not reach to what holds it.

    Attributes:
        targets: the most objects that it begins with. `gc.get_referrers` compares each reference of the heap
            with each of them: 64 take twice the time of one.
        rounds: how often the whole heap is searched for them, of 15 to 100 ms each. Ten take about as long
            as the walk over all libraries.
        holders: the most objects that it finds: beyond that something large is held in many ways.
    """

    targets: int = 64
    rounds: int = 10
    holders: int = 4096


LIMITS: Final = SearchLimits()
_SOUGHT: Final = frozenset((TENSOR, NODE, FUTURE, SAVED, PLACEHOLDER))
"""Kinds of objects that hold the memory of tensors: all that a library has of them is found."""
_LOOK_AT_CLOCK_EVERY: Final = 4096


class HeapGraph:
    """Objects reached by a walk. Index `i` stands for `objects[i]` everywhere.

    Attributes:
        objects: the objects, roots and what was reached from them, in order of discovery.
        parents: index of the object through which each was first reached; -1 for a root.
        root_names: text for each root index.
        not_searched: roots of a partial walk: what leads to them was not walked.
        tensors: indexes of tensors.
        nodes: indexes of autograd nodes.
        modules, optimizers: indexes of `nn.Module`s and of optimizers (torch's, and what looks like one).
        arrays: indexes of numpy arrays that own their data.
        first_own: objects from this index up to `first_unrooted` are memtriage's own.
        first_unrooted: objects from this index on are held by C++ or by the interpreter only.
        first_garbage: objects from this index on are held by nothing but each other.
        cut: why the walk is partial; None when it is whole.
        all_libraries: everything that library modules lead to was walked. Otherwise of their objects only
            those were that lead to tensors, and the containers that were asked for.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.parents: list[int] = []
        self.index: dict[int, int] = {}
        self.kinds = KindTable()
        self.reader = autograd.NodeReader()
        self.root_names: dict[int, str] = {}
        self.not_searched: set[int] = set()
        self.tensors: list[int] = []
        self.nodes: list[int] = []
        self.modules: list[int] = []
        self.optimizers: list[int] = []
        self.arrays: list[int] = []
        self.first_own = 0
        self.first_unrooted = 0
        self.first_garbage = 0
        self.cut: str | None = None
        self.all_libraries = True

    def drop(self) -> None:
        """Release every object."""
        for indexes in (self.parents, self.tensors, self.nodes, self.modules, self.optimizers, self.arrays):
            indexes.clear()
        self.objects.clear()
        self.index.clear()
        self.root_names.clear()
        self.not_searched.clear()
        self.kinds.clear()
        self.reader = autograd.NodeReader()

    def kind(self, position: int) -> int:
        """How the object at a position is walked (`TENSOR`, `NODE`, ...)."""
        return self.kinds[type(self.objects[position])]

    def referents(self, position: int) -> list[Any]:
        """What the object at a position refers to, autograd edges included."""
        obj = self.objects[position]
        kind = self.kinds.known[id(type(obj))]
        return gc.get_referents(obj) if kind == PLAIN else edges(obj, kind, self.reader)

    def not_walked(self) -> list[Any]:
        """Return the tracked objects that the walk has not reached, but for modules and its own lists."""
        index = self.index
        namespaces = {id(variables_of(module)) for module in _modules()}
        return [
            obj
            for obj in tracked_objects()
            if (at := index.get(id(obj))) is None or (at < 0 and id(obj) in namespaces)
        ]


class HeapWalk:
    """`with Walk() as graph:` walks the heap, gives the graph and drops it on exit.

    Automatic collection is off meanwhile: a collection in the middle would free cycles that the walk is
    about to report, and would run finalizers of the watched program at a moment it did not choose.
    A class, not a `contextlib.contextmanager`: that one's frame would stand among the program's own.

    Args:
        frames: frames that no longer run but whose variables are alive (an exception's traceback).
        budget: when to stop; `BUDGET` where none is given.
        also: given where, of the libraries, which are most of a heap, no more is to be walked than what leads
            to tensors. It takes the objects that the program's own variables do not reach, and returns the
            containers that are wanted besides; these are left out where too much leads to them. Where too
            much leads to tensors, all libraries are walked.
    """

    def __init__(
        self,
        frames: Sequence[FrameType] = (),
        budget: CensusBudget | None = None,
        also: Callable[[Iterable[Any]], Sequence[Any]] | None = None,
    ) -> None:
        self._frames = frames
        self._budget = budget or BUDGET
        self._also = also

    def __enter__(self) -> HeapGraph:
        self._collects = pause_collector()
        self._guards = contextlib.ExitStack()
        self._guards.enter_context(undisturbed())
        self._graph = HeapGraph()
        try:
            _Walker(self._graph, self._frames, self._budget, self._also).run()
        except BaseException:
            self.__exit__()
            raise
        return self._graph

    def __exit__(self, *exception: object) -> None:
        self._graph.drop()
        self._guards.close()
        resume_collector(self._collects)


class _Walker:
    def __init__(
        self,
        graph: HeapGraph,
        ended: Sequence[FrameType],
        budget: CensusBudget,
        also: Callable[[Iterable[Any]], Sequence[Any]] | None = None,
    ) -> None:
        self.budget = budget
        self.also = also
        self.deadline_s = time.thread_time() + budget.seconds
        self.graph = graph
        self.ended = ended
        self.origin = CodeOrigin()
        self.kinds = graph.kinds
        self.reader = graph.reader
        self.head = 0
        self.library_classes: list[type] = []
        self.waiting_nodes: list[tuple[Any, int]] = []
        self.waiting_optimizers: list[tuple[Any, int]] = []
        self.everything = tracked_objects()
        self.total = len(self.everything)
        large = self.total > budget.objects // 2
        self.widest = budget.wide if large else sys.maxsize
        self.wide: list[int] = []
        self.reader.find_checkpoints(self.everything)
        own_parts = (*vars(graph).values(), *vars(self).values(), *vars(self.kinds).values())
        for own in (vars(graph), self.everything, *own_parts):
            self._fence(own)

    def run(self) -> None:
        modules = self._module_roots()
        for name, module in modules:
            if self._is_user(module):
                self._enter_module(name, module)
        self._exhaust()
        frames = list(running_frames(self.origin.is_own_file))
        frames += [(None, frame) for frame in self.ended]
        for _, frame in frames:
            self._fence(frame)
        # All that the user's functions lead to goes by their names: a library function that happens to run
        # (an optimizer's step) has a shorter path to nearly everything.
        for users in (True, False):
            for thread, frame in frames:
                if self.origin.is_user_file(frame.f_code.co_filename) is users:
                    self._root(FrameLocals(frame, thread), "")
            self._exhaust()
        del frames
        self._release()
        libraries = [(name, module) for name, module in modules if not self._is_user(module)]
        if self._search_back(libraries):
            return
        for name, module in libraries:
            self._enter_module(name, module)
        self._exhaust()
        for klass in self.library_classes:
            self._enter_class(klass)
        self._exhaust()
        self._release()
        self._enter_wide()
        graph = self.graph
        if graph.cut is not None:
            self._rescue()
            graph.first_own = graph.first_unrooted = graph.first_garbage = len(graph.objects)
            return
        graph.first_own = len(graph.objects)
        for name, module in _own_modules():
            self._enter_module(name, module)
        self._exhaust()
        self._release()
        self._leftovers()

    # --- libraries, from what they hold ---------------------------------------------------------------------

    def _search_back(self, libraries: Sequence[tuple[str, ModuleType]]) -> bool:
        """Walk of the libraries only what leads to tensors and to wanted containers, if that is not much.

        Most of a heap is functions, classes and tables of libraries. A breadth-first walk from the same roots
        through none but the ancestors of what is sought gives the same paths.

        Returns:
            Whether that was done. If not, the libraries are still to be walked.
        """
        graph = self.graph
        if self.also is None:
            return False
        self._enter_wide()
        if graph.cut is not None:
            return False
        sought = self._that_hold_tensors()
        holders = self._holders_of(sought, libraries)
        if holders is None:
            return False
        containers = self._wanted_containers(self.also)
        also_holders = self._holders_of(containers, libraries)
        if also_holders is not None:
            sought += containers
            holders |= also_holders
        del containers, also_holders  # more references would look like some from outside
        graph.all_libraries = False
        for name, module in libraries:
            if id(variables_of(module)) in holders:
                self._enter_module(name, module)
        self._walk_within(holders)
        self._enter_classes(holders)
        self._walk_within(holders)
        self._walk_below(sought)
        graph.first_own = len(graph.objects)
        for name, module in _own_modules():
            if id(variables_of(module)) in holders:
                self._enter_module(name, module)
        self._walk_within(holders)
        self._walk_below(sought)
        self.everything = [
            obj for obj in self.everything if id(obj) in holders and id(obj) not in graph.index
        ]
        holders.clear()
        sought.clear()
        self._leftovers()
        return True

    def _that_hold_tensors(self) -> list[Any]:
        """Return what has the memory of tensors and was not reached."""
        index, kinds = self.graph.index, self.kinds
        types = {id(kind): kind for kind in map(type, self.everything)}
        wanted = {key for key, kind in types.items() if kinds[kind] in _SOUGHT}
        return [obj for obj in self.everything if id(type(obj)) in wanted and id(obj) not in index]

    def _wanted_containers(self, also: Callable[[Iterable[Any]], Sequence[Any]]) -> list[Any]:
        index = self.graph.index
        namespaces = {id(variables_of(module)) for module in _modules()}
        not_reached = (obj for obj in self.everything if id(obj) not in index and id(obj) not in namespaces)
        return list(also(not_reached))

    def _holders_of(
        self, sought: list[Any], libraries: Sequence[tuple[str, ModuleType]]
    ) -> dict[int, Any] | None:
        """Return all objects through which roots lead to some objects, these included, by their ids.

        Returns:
            None where there are too many.
        """
        index, kinds = self.graph.index, self.kinds
        roots = {id(variables_of(module)) for _, module in [*libraries, *_own_modules()]}
        holders = {id(obj): obj for obj in sought}
        waiting = list(sought)
        passed_over = {id(part) for part in (sought, holders, waiting)}
        for _ in range(LIMITS.rounds):
            if not waiting:
                return holders
            if len(waiting) > LIMITS.targets or len(holders) > LIMITS.holders:
                break
            referrers = gc.get_referrers(*waiting)
            waiting.clear()
            for referrer in referrers:
                key, kind = id(referrer), kinds[type(referrer)]
                if key in holders or key in passed_over or kind in (ATOM, BOUNDARY):
                    continue
                is_root = key in roots or kind == KLASS
                if key in index and not (is_root and index[key] < 0):
                    continue
                holders[key] = referrer
                if not is_root:
                    waiting.append(referrer)
            del referrers
        holders.clear()
        return None

    def _enter_classes(self, holders: dict[int, Any]) -> None:
        for obj in holders.values():
            if self.kinds[type(obj)] == KLASS and self.graph.index.get(id(obj), -1) < 0:
                self._enter_class(obj)

    def _walk_within(self, wanted: Container[int]) -> None:
        """Walk on, but enter no other objects than these, and no classes, which are roots."""
        graph = self.graph
        while self.head < len(graph.objects):
            obj, position = graph.objects[self.head], self.head
            self.head += 1
            for child in self._children(obj, self.kinds[type(obj)], position):
                if id(child) not in wanted or id(child) in graph.index:
                    continue
                if self.kinds[type(child)] != KLASS:
                    self._enter(child, position)

    def _walk_below(self, sought: Sequence[Any]) -> None:
        """Walk all that the objects lead to that were found so far."""
        graph = self.graph
        for obj in sought:
            position = graph.index.get(id(obj), -1)
            if position >= 0:
                self._enter_children(graph.referents(position), position)
        self._exhaust()
        self._release()

    def _is_user(self, module: ModuleType) -> bool:
        name = _module_variable(module, "__name__") or ""
        if name == "__main__":
            return True
        package = sys.modules.get(name.partition(".")[0], module)  # torch.ops has a file of its own kind
        files = (_module_variable(part, "__file__") for part in (module, package))
        return all(self.origin.is_user_file(file) for file in files)

    def _module_roots(self) -> list[tuple[str, ModuleType]]:
        """Every loaded module but memtriage's, `__main__` first; their dicts are entered only as roots."""
        roots: list[tuple[str, ModuleType]] = []
        for name, module in list(sys.modules.items()):
            if not issubclass(type(module), ModuleType):
                continue
            self._fence(module)
            self._fence(variables_of(module))
            if name.partition(".")[0] == "memtriage":
                continue
            if name == "__main__":
                roots.insert(0, (_main_name(module), module))
            elif name != "__mp_main__":
                roots.append((name, module))
        return roots

    def _fence(self, obj: Any) -> None:
        """Keep the walk from entering an object: it is a root of its own, or not wanted at all."""
        self.graph.index.setdefault(id(obj), -1)

    def _root(self, obj: Any, name: str) -> None:
        graph = self.graph
        self.kinds.classify(obj)
        graph.index[id(obj)] = position = len(graph.objects)
        graph.objects.append(obj)
        graph.parents.append(-1)
        graph.root_names[position] = name

    def _enter_module(self, name: str, module: ModuleType) -> None:
        namespace = variables_of(module)
        if self.graph.index[id(namespace)] < 0:  # else it was entered under another name (`os.path`)
            self._root(namespace, name)

    def _enter_class(self, klass: type) -> None:
        name = f"{_module_text(klass)}.{qualified_name_of(klass)}"
        self._root(klass, name)

    def _exhaust(self) -> None:
        """Walk on until the queue is empty. The hot loop: local names only, one dict probe per edge."""
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
            children = referents(obj) if kind == PLAIN else self._children(obj, kind, head)
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
            walked = f"{len(graph.objects):,} of more than {self.total:,} objects"
            if len(graph.objects) > budget.objects:
                graph.cut = f"searched {walked}, the most that a census takes"
            elif time.thread_time() > self.deadline_s:
                graph.cut = f"searched {walked}, in the longest time that a census takes"
        return graph.cut is not None

    def _enter_wide(self) -> None:
        """Walk the containers that were put off because they have very many entries."""
        self.widest = sys.maxsize
        graph = self.graph
        if self.wide:
            self.deadline_s = min(self.deadline_s, time.thread_time() + self.budget.wide_seconds)
        for position in self.wide:
            children = gc.get_referents(graph.objects[position])
            for start in range(0, len(children), _LOOK_AT_CLOCK_EVERY):
                if self._is_spent():
                    return
                self._enter_children(children[start : start + _LOOK_AT_CLOCK_EVERY], position)
            self._exhaust()
        self._release()

    def _enter_children(self, children: Iterable[Any], position: int) -> None:
        """Enter what the object at a position leads to, or let it wait."""
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
                self._enter(child, position)

    def _enter(self, obj: Any, holder: int) -> None:
        graph = self.graph
        graph.index[id(obj)] = len(graph.objects)
        graph.objects.append(obj)
        graph.parents.append(holder)

    def _rescue(self) -> None:
        """Enter the tensors, modules and optimizers that a partial walk has not reached.

        So the sizes are complete, as far as tensors have Python objects, where the holders are not.
        """
        graph, kinds = self.graph, self.kinds
        wanted = frozenset((TENSOR, MODULE, OPTIMIZER))
        for position in range(self.head, len(graph.objects)):
            kind = kinds[type(graph.objects[position])]
            if kind in wanted:
                self._children(graph.objects[position], kind, position)
        for obj in self.everything:
            kind = kinds[type(obj)]
            if kind in wanted and graph.index.get(id(obj), -1) < 0:
                graph.not_searched.add(len(graph.objects))
                self._root(obj, "")
                self._children(obj, kind, len(graph.objects) - 1)
        self.head = len(graph.objects)
        self.everything.clear()

    def _release(self) -> None:
        """Enter what has waited, graphs before optimizers, and walk what they lead to."""
        graph = self.graph
        while self.waiting_nodes or self.waiting_optimizers:
            waiting = self.waiting_nodes or self.waiting_optimizers
            for obj, holder in waiting:
                if id(obj) not in graph.index:
                    self._enter(obj, holder)
            waiting.clear()
            self._exhaust()

    def _meet_class(self, klass: type) -> None:
        self._fence(klass)
        name = module_of(klass)
        module = sys.modules.get(name)
        if type(module) is ModuleType and self._is_user(module):
            self._enter_class(klass)
        elif name.partition(".")[0] != "memtriage":
            self.library_classes.append(klass)

    def _children(self, obj: Any, kind: int, position: int) -> list[Any]:
        graph = self.graph
        if kind == TENSOR:
            graph.tensors.append(position)
            return tensor_referents(obj)
        if kind == NODE:
            graph.nodes.append(position)
            return self.reader.referents(obj)
        if kind in (LOCALS, FUTURE, SAVED, PLACEHOLDER):
            return edges(obj, kind, self.reader)
        if kind == MODULE:
            graph.modules.append(position)
        elif kind == OPTIMIZER:
            graph.optimizers.append(position)
        elif kind == ARRAY:
            graph.arrays.append(position)
            return [obj.base] if obj.base is not None else gc.get_referents(obj)
        return gc.get_referents(obj)

    def _leftovers(self) -> None:
        """Enter what no root reaches: first what something invisible refers to, then garbage cycles.

        An object with more references than this walk can account for is held from C++, by another
        interpreter structure or by an evaluation stack; the others are kept only by each other.
        """
        graph = self.graph
        graph.first_unrooted = len(graph.objects)
        index, kinds, skipped = graph.index, self.kinds, (ATOM, BOUNDARY, KLASS)
        left = [obj for obj in self.everything if id(obj) not in index]
        self.everything.clear()
        left = [obj for obj in left if kinds[type(obj)] not in skipped]
        if not left:
            graph.first_garbage = len(graph.objects)
            return
        gradients = _plain_gradients(left, self.kinds)
        held = _held_from_outside(left, self.kinds, gradients)
        for obj in held:
            if id(obj) not in graph.index:
                self._root(obj, "")
                self._exhaust()
                self._release()
        held.clear()
        graph.first_garbage = len(graph.objects)
        for obj in sorted(left, key=lambda leftover: id(leftover) in gradients):
            if id(obj) not in graph.index:
                self._root(obj, "")
                self._exhaust()
                self._release()


def _plain_gradients(left: list[Any], kinds: KindTable) -> frozenset[int]:
    """Return the ids of the gradients of `left`'s tensors that carry no graph.

    They lead nowhere: each belongs to its tensor, whatever keeps that alive.
    """
    owners = (plain(obj) for obj in left if kinds[type(obj)] == TENSOR and _carries_gradient(obj))
    return frozenset(id(owner.grad) for owner in owners if plain(owner.grad).grad_fn is None)


def _held_from_outside(left: list[Any], kinds: KindTable, gradients: frozenset[int]) -> list[Any]:
    """Objects among `left` that something besides `left` refers to, containers first.

    Only references that the cyclic collector sees count as from within: a cycle that leads through C++
    (output -> grad_fn -> ctx -> output) is nothing that it will ever free, and is held by C++. So does the
    reference that a tensor has to its gradient, where that carries no graph (`gradients`).
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
    # A tensor in a list that C++ holds is named by the list; a leaf with a gradient leads on to the graph
    # that the gradient carries; a custom Function's node says more than an anonymous tensor.
    leaves = [tensor for tensor in tensors if _carries_gradient(tensor)]
    return others + leaves + nodes + [tensor for tensor in tensors if not _carries_gradient(tensor)]


def _reference_counts(objects: list[Any]) -> list[int]:
    return [sys.getrefcount(obj) for obj in objects]


_COUNTING: Final = _reference_counts([object()])[0]
"""Its count of an object that only the list refers to; versions of Python differ."""


def _count_references(objects: list[Any], count: dict[int, int]) -> None:
    """Add to `count`, by id, how often these objects refer to each that is in it.

    In a function of its own: its variables go with it, and are no references to the last objects.
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


def _modules() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)]


def _own_modules() -> list[tuple[str, ModuleType]]:
    modules = list(sys.modules.items())
    return [(name, module) for name, module in modules if name.partition(".")[0] == "memtriage"]


def _module_variable(module: Any, name: str) -> str | None:
    """A module's `__name__` or `__file__`; None where it is not set, no text, or no module holds it."""
    value = variables_of(module).get(name) if issubclass(type(module), ModuleType) else None
    return value if isinstance(value, str) else None


def _main_name(module: ModuleType) -> str:
    file = _module_variable(module, "__file__")
    if not file:
        return "__main__"
    stem = os.path.splitext(os.path.basename(file))[0]
    return os.path.basename(os.path.dirname(os.path.abspath(file))) if stem == "__main__" else stem


def _module_text(klass: type) -> str:
    name = module_of(klass)
    return _main_name(sys.modules["__main__"]) if name == "__main__" else name
