"""What a walk over the heap reached: objects, how each was reached, and their kinds."""

from __future__ import annotations

from typing import Any

from memtriage.observe import autograd
from memtriage.observe.classes import variables_of
from memtriage.observe.edges import edges
from memtriage.observe.kinds import PLAIN, KindTable
from memtriage.observe.loaded_modules import modules
from memtriage.observe.objects import not_among, tracked_objects
from memtriage.process.stdlib import gc


class HeapGraph:
    """Objects reached by a walk. Index `i` means `objects[i]` everywhere.

    Attributes:
        objects: the objects, roots and what was reached from them, in order of discovery.
        parents: index of the object through which each was first reached; -1 for a root.
        root_names: names of roots, by index.
        not_searched: roots of a partial walk: what leads to them was not walked.
        tensors: indexes of tensors.
        nodes: indexes of autograd nodes.
        modules, optimizers: indexes of `nn.Module`s and of optimizers (torch's, and what looks like one).
        arrays: indexes of numpy arrays that own their data.
        first_own: objects from this index up to `first_unrooted` are memtriage's own.
        first_unrooted: objects from this index on are only held by C++ or by the interpreter.
        first_garbage: objects from this index on are only held by each other.
        cut: why the walk is partial; None if it is whole.
        collects: Python's cyclic collector is on in the program.
        all_libraries: everything that library modules lead to was walked. Otherwise only those of their
            objects that lead to tensors, and the wanted containers.
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
        self.collects = True
        self.tracked = 0
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
        return self.kinds.known[id(type(self.objects[position]))]

    def referents(self, position: int) -> list[Any]:
        """What the object at a position refers to, autograd edges included."""
        obj = self.objects[position]
        kind = self.kinds.known[id(type(obj))]
        return gc.get_referents(obj) if kind == PLAIN else edges(obj, kind, self.reader)

    def not_walked(self) -> list[Any]:
        """Return the tracked objects that the walk has not reached, except modules and its own lists."""
        index, tracked = self.index, tracked_objects()  # listed first: the result must not list itself
        fenced = (space for space in map(variables_of, modules()) if index.get(id(space), 0) < 0)
        return [*not_among(tracked, index), *fenced]
