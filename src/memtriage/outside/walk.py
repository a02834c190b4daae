"""One breadth-first walk over another process's objects, from the same roots as `memtriage.observe.heap`.

The order of the roots, and of what each object refers to, is that of the walk inside: so both find the same
holder for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from memtriage.observe.frames import alike_named
from memtriage.observe.roots import enter_libraries, enter_program
from memtriage.outside.graph import RemoteFrame, RemoteGraph
from memtriage.outside.interpreter import RemoteInterpreter
from memtriage.outside.loaded_modules import RemoteModules
from memtriage.outside.memory import Words
from memtriage.outside.objects import Frame, RemoteHeap
from memtriage.outside.tensors import TorchReader
from memtriage.outside.unrooted import Unrooted
from memtriage.outside.values import Translate
from memtriage.outside.walker import RemoteWalker
from memtriage.process.stdlib import os

WORKER_FILE: Final = os.path.join("torch", "utils", "data", "_utils", "worker.py")
"""Has the function that runs in each worker of a `DataLoader`, with the program's data set."""


class RemoteWalk:
    """Walks one process once.

    Args:
        heap, torch, interpreter, modules: of the process.
        translate: from an address of this process to that of the same thing there.
        frames: of its threads, as `RemoteInterpreter.frames` returns them.
        is_late: whether the time for the walk is over.
        outermost_first: name what is in variables by the functions that have run for longest, whose names
            are the same at each reading.

    Attributes:
        chunks: numbers of the chunks in which the program's own objects are, and what they lead to.
        program_end: position after these objects.
    """

    def __init__(
        self,
        heap: RemoteHeap,
        torch: TorchReader,
        interpreter: RemoteInterpreter,
        modules: RemoteModules,
        translate: Translate,
        frames: Sequence[tuple[int | None, Frame]],
        is_late: Callable[[], bool],
        *,
        outermost_first: bool = False,
    ) -> None:
        self.chunks: list[int] = []
        self.program_end = 0
        self._walker = RemoteWalker(heap, torch, modules, translate, is_late)
        self._graph = self._walker.graph
        self._modules = modules
        self._heap = heap
        self._interpreter = interpreter
        self._running = frames[::-1] if outermost_first else frames
        self._outermost_first = outermost_first

    def run(self, *, program_only: bool = False) -> RemoteGraph:
        """Walk, and return the graph.

        Args:
            program_only: leave out what only libraries hold, which is most of the heap and hardly changes.
        """
        graph, walker, modules = self._graph, self._walker, self._modules
        self._find_checkpoints(*self._tracked(young=True))
        roots = modules.roots(self._interpreter, graph.index.fence)
        users = {module for _, module in roots if modules.is_user(module)}
        enter_program(walker, [root for root in roots if root[1] in users], self._frames)
        self.chunks, self.program_end = self._heap.memory.asked(), len(graph.objects)
        if program_only:
            graph.first_unrooted = graph.first_garbage = len(graph.objects)
            return graph
        enter_libraries(walker, [root for root in roots if root[1] not in users])
        Unrooted(walker).enter(*self._tracked())
        return graph

    def _tracked(self, *, young: bool = False) -> tuple[Words, Words]:
        """Return what the collector follows, and the rows of the classes."""
        tracked, memory = self._interpreter.tracked(young=young), self._heap.memory
        return tracked, self._walker.rows.rows(memory.data[memory.places(tracked) + 1])

    def _frames(self) -> list[tuple[RemoteFrame, bool]]:
        names = alike_named(self._thread_names())
        frames = []
        for ident, frame in self._running:
            if self._modules.origin.is_own_file(frame.file):
                continue
            self._graph.index.fence(frame.own_object)  # as the frame was read: the heap may be older
            thread = None if ident is None else names.get(ident, f"id {ident}")
            runs_program = self._outermost_first and frame.file.endswith(WORKER_FILE)
            frames.append(
                (RemoteFrame(frame, thread), runs_program or self._modules.is_user_file(frame.file))
            )
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
