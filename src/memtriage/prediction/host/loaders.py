"""Workers of a `torch.utils.data.DataLoader`: what they make their own, and the batches under way."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from memtriage.prediction.host.libraries import measure_worker
from memtriage.prediction.host.memory import BATCHES, OBJECTS, PINNED, WORKERS, HostMemory, MemoryPlace
from memtriage.prediction.notes import Notes

_GRANULE: Final = 16
"""Bytes: Python's allocator rounds up to it (Objects/obmalloc.c)."""
_NO_DATA: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)
"""Kinds of objects whose references lead out of a data set."""


def replacements(memory: HostMemory, notes: Notes) -> list[tuple[Any, str, Any]]:
    """The attributes to replace: owner, name, value."""
    original = DataLoader.__iter__
    workers = _Workers(memory, notes)

    def iterate(loader: DataLoader[Any]) -> Any:
        batches = original(loader)
        return workers.followed(loader, batches) if loader.num_workers or loader.pin_memory else batches

    return [(DataLoader, "__iter__", iterate)]


class _Workers:
    def __init__(self, memory: HostMemory, notes: Notes) -> None:
        self._memory = memory
        self._notes = notes
        self._objects: dict[int, int] = {}  # bytes by data set
        self._alone: dict[bool, int] = {}

    def followed(self, loader: DataLoader[Any], batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; while they are read there are workers, and batches that wait."""
        memory, blocks = self._memory, []
        if loader.num_workers:
            own = self._own(loader)
            blocks.append(memory.allocate(loader.num_workers * own, WORKERS, MemoryPlace.MAPPING))
        try:
            first = True
            for batch in batches:
                if first:
                    blocks += self._waiting(loader, batch)
                    first = False
                yield batch
                del batch
        finally:
            for block in blocks:
                memory.free(block)

    def _own(self, loader: DataLoader[Any]) -> int:
        """Bytes that each worker makes its own: counts of references are written in all objects it reads."""
        forked = (loader.multiprocessing_context or multiprocessing).get_start_method() == "fork"
        if forked not in self._alone:
            measured = measure_worker(forked)
            if measured is None:
                self._notes.add("what a worker needs could not be measured: only its data set counts")
            self._alone[forked] = measured or 0
        data = loader.dataset
        if id(data) not in self._objects:
            self._objects[id(data)] = size = objects_size(data)
            self._memory.follow(data, size, OBJECTS)
            with suppress(TypeError):
                weakref.finalize(data, self._objects.pop, id(data))  # the next one may be at its address
            self._notes.add(
                "each worker is taken to read the whole data set, and so to copy all its Python objects",
            )
        return self._alone[forked] + self._objects[id(data)]

    def _waiting(self, loader: DataLoader[Any], batch: Any) -> list[int]:
        """Batches that are ready or in use, as large as the first one."""
        size = sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        blocks = []
        if loader.num_workers:
            ahead = loader.num_workers * (loader.prefetch_factor or 2) + 1
            try:
                ahead = min(ahead, len(loader))
            except TypeError:  # of an iterable without a length
                pass
            blocks.append(self._memory.allocate(size * ahead, BATCHES, MemoryPlace.MAPPING))
        if loader.pin_memory and torch.cuda.is_available():
            blocks.append(self._memory.allocate(2 * size, PINNED, MemoryPlace.PINNED))
        return blocks


def objects_size(root: Any) -> int:
    """Bytes of the Python objects that an object leads to. Data of arrays and tensors is not counted: reading
    it writes nothing."""
    seen = {id(root)}
    waiting = [root]
    size = 0
    while waiting:
        found = waiting.pop()
        size += -(-_own_size(found) // _GRANULE) * _GRANULE
        if not gc.is_tracked(found) and not isinstance(found, (tuple, dict)):
            continue  # leads to nothing
        # A dict whose keys are all text does not say that it refers to them.
        keys = found.keys() if isinstance(found, dict) else ()
        for each in (*gc.get_referents(found), *keys):
            if id(each) not in seen and not isinstance(each, _NO_DATA):
                seen.add(id(each))
                waiting.append(each)
    return size


def _own_size(found: Any) -> int:
    if isinstance(found, (torch.Tensor, torch.UntypedStorage)) or type(found).__module__ == "numpy":
        return object.__sizeof__(found)
    return sys.getsizeof(found)
