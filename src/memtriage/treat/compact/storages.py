"""Finds the storages of chosen blocks, and says of the others why they cannot move.

Two stages. First the tensors and storages that Python's collector knows: one pass of C code over its list,
and addresses compared in numpy. Only for blocks that are then still nobody's, what Python does not see is
looked up: gradients, what autograd nodes saved for backward, futures, the parts of sparse tensors.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import chain, compress
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch

from memtriage.observe.autograd import NodeReader
from memtriage.observe.heap import (
    FUTURE,
    NODE,
    SAVED,
    TENSOR,
    KindTable,
    Walk,
    future_referents,
    tensor_referents,
)
from memtriage.treat.compact.plan import Movable
from memtriage.treat.device.layout import Int64s, Layout

GRAPH: Final = "a CUDA graph is alive, which may have its address"
CPP_ONLY: Final = "held by C++ only: no Python object and no autograd node leads to it"
NOT_OURS: Final = (
    "shared with another process, or its memory is not the allocator's own (IPC, DLPack, from_blob)"
)
FIXED: Final = "its storage cannot be resized"
SEVERAL: Final = "more than one storage lies in its block"
KEPT: Final = "asked to be kept in place"

_Tensor: Final = torch._C.TensorBase
_Storage: Final = torch.UntypedStorage
_HANDLE: Final = attrgetter("_cdata")


def find_storages(
    layout: Layout, blocks: Sequence[int], keep: Iterable[torch.Tensor | torch.UntypedStorage] = ()
) -> Movable:
    """The storages of some live blocks.

    Args:
        layout: where the blocks are.
        blocks: indices of the blocks.
        keep: must not move.
    """
    # No code of a subclass or of a mode is to run.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return _find(layout, blocks, keep)


def _find(
    layout: Layout, blocks: Sequence[int], keep: Iterable[torch.Tensor | torch.UntypedStorage]
) -> Movable:
    found = Movable()
    if not blocks:
        return found
    search = _Search(layout, np.array(sorted(blocks), np.int64))
    graph_kinds = _classes_below(torch.cuda.CUDAGraph)
    kinds = _classes_below(torch.Tensor) | {_Storage}
    wanted = kinds | graph_kinds | {_Marker}
    objects = gc.get_objects()
    listed = list(compress(objects, map(wanted.__contains__, map(type, objects))))
    del objects
    met = [one for one in listed if type(one) in kinds]
    others = [one for one in listed if type(one) not in kinds] if len(met) < len(listed) else []
    for one in _frozen.objects([one for one in others if type(one) is _Marker], kinds | graph_kinds):
        (met if type(one) in kinds else others).append(one)
    if any(_captured(one) for one in others if type(one) in graph_kinds):
        found.reasons = dict.fromkeys(search.blocks.tolist(), GRAPH)
        return found
    search.meet_all(met)
    if search.missing():
        search.meet_all(_hidden(met))
    search.judge(found, set(chain.from_iterable(map(_kept_addresses, keep))))
    return found


class _Marker:
    """An object that the collector lists for as long as nobody calls `gc.freeze()`."""


class _Frozen:
    """What `gc.freeze()` was called on: the collector lists it no more, and nothing joins it until the next
    call. It is looked up once, by a walk of the heap, and known weakly from then on."""

    def __init__(self) -> None:
        self._marker: _Marker | None = None
        self._known: list[weakref.ref[Any]] = []

    def objects(self, markers: Sequence[Any], kinds: Set[type]) -> list[Any]:
        """Those of some classes that are alive.

        Args:
            markers: those that the collector lists now.
            kinds: the classes.
        """
        # How many are frozen is counted one by one, so that is asked a single time.
        frozen = gc.get_freeze_count() > 0 if self._marker is None else self._marker not in markers
        if frozen:
            with Walk() as graph:
                self._known = [weakref.ref(one) for one in graph.objects if type(one) in kinds]
        if frozen or self._marker is None:
            self._marker = _Marker()
        return [one for reference in self._known if (one := reference()) is not None]


_frozen: Final = _Frozen()


class _Search:
    """Storages by block, as objects are met. In columns: there may be tens of thousands."""

    def __init__(self, layout: Layout, blocks: Int64s) -> None:
        self.blocks = blocks[np.argsort(layout.address[blocks])]
        self._start = layout.address[self.blocks]
        self._size = layout.size[self.blocks]
        self._end = self._start + self._size
        self._met = np.zeros(len(self.blocks), bool)
        self._position: list[int] = []
        self._storage: list[torch.UntypedStorage] = []

    def missing(self) -> bool:
        """True if a block has no storage yet."""
        return not self._met.all()

    def meet_all(self, objects: Iterable[Any]) -> None:
        """Tensors and storages, any of them."""
        known = list(objects)
        tensors = [one for one in known if type(one) is not _Storage]
        storages = [one for one in known if type(one) is _Storage] if len(tensors) < len(known) else []
        self._meet_at(tensors, _addresses(tensors, _Tensor.data_ptr), _Tensor.untyped_storage)
        self._meet_at(storages, _addresses(storages, _Storage.data_ptr), _itself)

    def _meet_at(self, objects: list[Any], address: Int64s, storage_of: Callable[[Any], Any]) -> None:
        # An empty view has no address, but keeps its storage alive.
        for index in np.flatnonzero(address == 0).tolist():
            address[index] = _base(objects[index])
        at = np.searchsorted(self._start, address, side="right") - 1
        which = np.flatnonzero((at >= 0) & (address < self._end[at]))
        self._met[at[which]] = True
        self._position += at[which].tolist()
        self._storage += map(storage_of, map(objects.__getitem__, which.tolist()))

    def judge(self, found: Movable, kept: set[int]) -> None:
        """Fill in what can move and why not."""
        for block in self.blocks[~self._met].tolist():
            found.reasons[block] = CPP_ONLY
        if not self._storage:
            return
        position = np.array(self._position)
        handle = np.fromiter(map(_HANDLE, self._storage), np.uint64, len(self._storage))
        order = np.lexsort((handle, position))
        position, handle = position[order], handle[order]
        first = np.flatnonzero(np.diff(position, prepend=-1))
        last = np.append(first[1:], len(position)) - 1
        storages = list(map(self._storage.__getitem__, order[first].tolist()))
        position = position[first]
        count = len(storages)
        base = np.fromiter(map(_Storage.data_ptr, storages), np.uint64, count).astype(np.int64)
        owned = getattr(torch._C, "_has_Standard_Deleter", None)
        sizes = np.fromiter(map(_Storage.nbytes, storages), np.int64, count)
        ours = (base == self._start[position]) & (sizes > 0) & (sizes <= self._size[position])
        if owned is not None:
            ours &= np.fromiter(map(owned, handle[first].tolist()), bool, count)
        obstacles = (
            (handle[first] != handle[last], SEVERAL),
            (np.isin(base, list(kept)), KEPT),
            (~ours, NOT_OURS),
            (~np.fromiter(map(_Storage.resizable, storages), bool, count), FIXED),
        )
        blocks = self.blocks[position]
        for hindered, why in obstacles:
            for block in blocks[hindered].tolist():
                found.reasons.setdefault(block, why)
        hindered = np.logical_or.reduce([one for one, _ in obstacles])
        free = compress(zip(blocks.tolist(), storages, strict=True), (~hindered).tolist())
        found.storages.update(free)


def _classes_below(root: type) -> set[type]:
    """A class and all that derive from it."""
    found: set[type] = set()
    todo = [root]
    for kind in todo:
        if kind not in found:
            found.add(kind)
            todo += type.__subclasses__(kind)
    return found


def _captured(graph: torch.cuda.CUDAGraph) -> bool:
    """True if it can be replayed: `pool()` raises before a capture and after `reset()`."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _addresses(objects: list[Any], address_of: Callable[[Any], int]) -> Int64s:
    """First bytes; 0 for what has none."""
    try:
        return np.fromiter(map(address_of, objects), np.uint64, len(objects)).astype(np.int64)
    except (RuntimeError, NotImplementedError, ReferenceError):
        return np.array([_address(one, address_of) for one in objects], np.uint64).astype(np.int64)


def _address(one: Any, address_of: Callable[[Any], int]) -> int:
    # Wrapper subclasses, sparse tensors, functorch's wrappers: their parts are objects of their own.
    try:
        return address_of(one)
    except (RuntimeError, NotImplementedError, ReferenceError):
        return 0


def _base(one: Any) -> int:
    """First byte of the storage of an empty view on a device; 0 for anything else."""
    try:
        storage = _storage_of(one)
        return int(storage.data_ptr()) if storage.device.type == "cuda" else 0
    except (RuntimeError, NotImplementedError, ReferenceError):
        return 0


def _kept_addresses(one: Any) -> Iterator[int]:
    """First bytes of the storages of what is to stay; of a wrapper those of its parts."""
    if hasattr(type(one), "__tensor_flatten__"):
        names, _ = one.__tensor_flatten__()
        for name in names:
            yield from _kept_addresses(getattr(one, name))
    else:
        yield int(_storage_of(one).data_ptr())


def _storage_of(one: Any) -> torch.UntypedStorage:
    return one if type(one) is _Storage else _Tensor.untyped_storage(one)


def _itself(storage: Any) -> Any:
    return storage


def _hidden(seeds: Iterable[Any]) -> Iterator[Any]:
    """Tensors that only tensors, autograd nodes and futures lead to."""
    kinds, reader = KindTable(), NodeReader()
    walked = (TENSOR, NODE, FUTURE, SAVED)
    nodes = [one for one in gc.get_objects() if kinds[type(one)] in (NODE, FUTURE, SAVED)]
    queue = [one for one in chain(seeds, nodes) if kinds[type(one)] in walked]
    known = set(map(id, queue))
    for one in queue:  # Grows as it goes, and keeps alive what `known` knows by address.
        kind = kinds[type(one)]
        if kind == TENSOR:
            yield one
            more = tensor_referents(one)
        elif kind == NODE:
            more = reader.referents(one)
        elif kind == FUTURE:
            more = future_referents(one)
        else:
            more = reader.saved_tensor_referents(one)
        for other in more:
            if id(other) not in known and kinds[type(other)] in walked:
                known.add(id(other))
                queue.append(other)
