"""One breadth-first walk over Python objects and autograd nodes, from ordered roots.

The result is a `HeapGraph` that **holds every object it lists**: it must be dropped before anything is
measured or the watched script continues (`with HeapWalk() as graph:`). Nothing is called that could run user
code; attributes of tensors are read as `torch.Tensor` itself does (`observe.tensors.plain`).

The roots are in this order; what an earlier one reaches stays with it:

1. the modules and classes of the user's program,
2. the frames of all threads, the user's functions first,
3. library modules and library classes,
4. what only C++ or the interpreter's own stack keeps alive,
5. what nothing keeps alive: garbage cycles that no collection has freed yet.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType

from memtriage.observe.classes import variables_of
from memtriage.observe.frames import running_frames
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.library_search import WantedContainers, enter_holders_of_tensors
from memtriage.observe.loaded_modules import is_user_module, main_name, own_modules
from memtriage.observe.roots import enter_libraries, enter_program
from memtriage.observe.tensors import undisturbed
from memtriage.observe.unrooted import enter_unrooted
from memtriage.observe.walker import CensusBudget, HeapWalker, ThreadFrame
from memtriage.process.collector import pause_collector, resume_collector


@dataclass
class HeapWalk:
    """`with HeapWalk() as graph:` walks the heap, and drops the graph on exit.

    Automatic collection is off meanwhile: a collection in the middle would free cycles that the walk is
    about to report, and would run finalizers of the watched program at a moment it did not choose.
    It is a class, because the frame of a `contextlib.contextmanager` would be among the program's.

    Args:
        frames: frames that no longer run but whose variables are alive (an exception's traceback).
        budget: when to stop; by default `walker.BUDGET`.
        wanted: given, only what leads to tensors is walked of the libraries, which are most of a heap. It is
            called with the growable containers that the program's own variables do not reach, and returns
            those to walk in addition. If libraries have more objects than the budget, all are walked, up to
            that.
    """

    frames: Sequence[FrameType] = ()
    budget: CensusBudget | None = None
    wanted: WantedContainers | None = None

    def __enter__(self) -> HeapGraph:
        self._collects = pause_collector()
        self._guards = contextlib.ExitStack()
        self._guards.enter_context(undisturbed())
        self._graph = HeapGraph()
        self._graph.collects = self._collects
        try:
            _walk_all(HeapWalker(self._graph, self.budget), self.frames, self.wanted)
        except BaseException:
            self.__exit__()
            raise
        return self._graph

    def __exit__(self, *exception: object) -> None:
        self._graph.drop()
        self._guards.close()
        resume_collector(self._collects)


def _walk_all(walker: HeapWalker, ended: Sequence[FrameType], wanted: WantedContainers | None) -> None:
    modules = _module_roots(walker)
    users = {id(module) for _, module in modules if is_user_module(module, walker.origin)}
    program = [(name, module) for name, module in modules if id(module) in users]
    enter_program(walker, program, lambda: _frames(walker, ended))
    libraries = [(name, module) for name, module in modules if id(module) not in users]
    graph = walker.graph
    if wanted is not None:
        walker.enter_wide()
        if graph.cut is None and graph.tracked - len(graph.objects) <= walker.budget.objects:
            enter_holders_of_tensors(walker, libraries, wanted)
            enter_unrooted(walker)
            return
    enter_libraries(walker, libraries)
    walker.enter_wide()
    if graph.cut is not None:
        walker.rescue()
        graph.first_own = graph.first_unrooted = graph.first_garbage = len(graph.objects)
        return
    graph.first_own = len(graph.objects)
    for name, module in own_modules():
        walker.enter_module(name, module)
    walker.exhaust()
    walker.release()
    enter_unrooted(walker)


def _module_roots(walker: HeapWalker) -> list[tuple[str, ModuleType]]:
    """Every loaded module except memtriage's, `__main__` first; their dicts are only entered as roots."""
    roots: list[tuple[str, ModuleType]] = []
    for name, module in list(sys.modules.items()):
        if not issubclass(type(module), ModuleType):
            continue
        walker.fence(module)
        walker.fence(variables_of(module))
        if name.partition(".")[0] == "memtriage":
            continue
        if name == "__main__":
            roots.insert(0, (main_name(module), module))
        elif name != "__mp_main__":
            roots.append((name, module))
    return roots


def _frames(walker: HeapWalker, ended: Sequence[FrameType]) -> list[tuple[ThreadFrame, bool]]:
    """Return all threads' frames and ended ones, and which are the user's. They are only entered as roots."""
    frames: list[ThreadFrame] = list(running_frames(walker.origin.is_own_file))
    frames += [(None, frame) for frame in ended]
    for _, frame in frames:
        walker.fence(frame)
    return [(pair, walker.origin.is_user_file(pair[1].f_code.co_filename)) for pair in frames]
