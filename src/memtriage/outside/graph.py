"""The result of a walk over another process's objects: the objects, and through which each was reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtriage.observe.kinds import LOCALS, NODE, TENSOR
from memtriage.outside.memory import RemoteMemory
from memtriage.outside.objects import Frame, RemoteHeap, RemoteType
from memtriage.outside.tensors import TorchReader

_FENCE: Final = -1


@dataclass(frozen=True, slots=True)
class RemoteFrame:
    """A running function, and the name of its thread where that is not the main one."""

    frame: Frame
    thread: str | None


class Positions:
    """Where each address is in the graph.

    Args:
        memory: of the process. What it does not have mapped counts as fenced, so it is never entered.
    """

    def __init__(self, memory: RemoteMemory) -> None:
        self._memory = memory
        self.by_place = np.zeros(len(memory.data), np.int32)
        """By the place of an address: position + 1, 0 where it is not met yet, -1 where it is fenced."""
        self.by_place[0] = _FENCE

    def __contains__(self, address: int) -> bool:
        return bool(self.by_place[self._memory.place(address)])

    def is_entered(self, address: int) -> bool:
        return bool(self.by_place[self._memory.place(address)] > 0)

    def enter(self, address: int, position: int) -> None:
        place = self._memory.place(address)
        if place:
            self.by_place[place] = position + 1

    def fence(self, address: int) -> None:
        """Keep the walk from entering an object from elsewhere: it is a root of its own, or not wanted."""
        if address not in self:
            self.by_place[self._memory.place(address)] = _FENCE


class RemoteGraph:
    """Objects reached by a walk. Index `i` stands for `objects[i]` everywhere.

    Attributes:
        objects: addresses: of the C++ object for tensors and nodes, of the frame for running functions.
        kinds: how each is walked (`memtriage.observe.kinds`).
        parents: index of the object through which each was first reached; -1 for a root.
        index: which addresses are in the graph, or are not to enter it.
        root_names: text for each root that is a module or a class.
        frames: by the address of the frame.
        tensors, nodes, modules, optimizers: indexes of these.
        checkpoints: the checkpoint of each placeholder for a saved tensor.
        saved: addresses of tensors that nodes save.
        first_unrooted, first_garbage: as in the walk inside.
        cut: why the walk is partial; None when it is whole.
    """

    def __init__(self, heap: RemoteHeap, torch: TorchReader) -> None:
        self.heap = heap
        self.torch = torch
        self.objects: list[int] = []
        self.kinds: list[int] = []
        self.parents: list[int] = []
        self.index = Positions(heap.memory)
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

    def kind(self, position: int) -> int:
        """Return how an object was walked."""
        return self.kinds[position]

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
