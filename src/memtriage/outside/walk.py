"""One breadth-first walk over another process's objects, from the same roots as `memtriage.observe.heap`.

The order of the roots, and of what each object refers to, is that of the walk inside: so both find the same
holder for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from memtriage.observe.frames import alike_named
from memtriage.observe.roots import enter_libraries, enter_program
from memtriage.outside.graph import RemoteFrame, RemoteGraph
from memtriage.outside.interpreter import RemoteInterpreter
from memtriage.outside.memory import Words
from memtriage.outside.objects import Frame, RemoteHeap
from memtriage.outside.tensors import TorchReader
from memtriage.outside.unrooted import Unrooted
from memtriage.outside.values import Translate
from memtriage.outside.walker import RemoteWalker


class RemoteWalk:
    """Walks one process once.

    Args:
        heap, torch, interpreter: of the process.
        translate: from an address of this process to that of the same thing there.
        frames: of its threads, as `RemoteInterpreter.frames` returns them.
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
        frames: Sequence[tuple[int | None, Frame]],
        is_late: Callable[[], bool],
        before: Words | None = None,
    ) -> None:
        self.tracked = np.zeros(0, np.int64)
        self._before = before
        self._walker = RemoteWalker(heap, torch, translate, is_late)
        self._graph = self._walker.graph
        self._modules = self._walker.modules
        self._heap = heap
        self._interpreter = interpreter
        self._running = frames

    def run(self) -> RemoteGraph:
        """Walk, and return the graph."""
        graph, walker, modules = self._graph, self._walker, self._modules
        tracked = self.tracked = self._interpreter.tracked(self._before)
        rows = self._walker.rows.rows(self._heap.memory.data[self._heap.memory.places(tracked) + 1])
        self._find_checkpoints(tracked, rows)
        roots = modules.roots(self._interpreter, graph.index.fence)
        users = {module for _, module in roots if modules.is_user(module)}
        enter_program(walker, [root for root in roots if root[1] in users], self._frames)
        enter_libraries(walker, [root for root in roots if root[1] not in users])
        Unrooted(walker).enter(tracked, rows)
        return graph

    def _frames(self) -> list[tuple[RemoteFrame, bool]]:
        names = alike_named(self._thread_names())
        frames = []
        for ident, frame in self._running:
            if self._modules.origin.is_own_file(frame.file):
                continue
            self._graph.index.fence(self._heap.memory.word(frame.address + self._heap.layout.frame_object))
            thread = None if ident is None else names.get(ident, f"id {ident}")
            frames.append((RemoteFrame(frame, thread), self._modules.is_user_file(frame.file)))
        return frames

    def _thread_names(self) -> dict[int, str]:
        heap = self._heap
        threading = self._modules.by_name.get("threading")
        if threading is None:
            return {}
        names = {}
        for key, thread in heap.dict_items(heap.dict_value(self._modules.namespace(threading), "_active")):
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
            klass = self._walker.rows.class_at(row)
            if klass is None or klass.bases[0] != "torch.utils.checkpoint._CheckpointFrame":
                continue
            frames = [(address, klass) for address in tracked[rows == row].tolist()]
            for address, klass in frames:
                for reference in heap.list_items(heap.attribute(address, klass, "weak_holders")):
                    placeholder = heap.memory.word(reference + heap.layout.weakref_object)
                    self._graph.checkpoints[placeholder] = address
