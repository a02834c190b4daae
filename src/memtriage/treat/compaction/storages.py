"""Find the storages of chosen blocks, and say why the others cannot move.

There are two stages. First come the tensors and storages that Python's collector knows: one pass of C code
over its list, with addresses compared in numpy. Then, only for blocks without a storage, what Python does not
see: gradients, what autograd nodes saved for backward, futures, the parts of sparse tensors.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter, not_
from typing import Any, Final

import numpy as np
import torch

from memtriage.catalogue.situation import is_captured
from memtriage.model.recording import Int64s
from memtriage.observe.autograd import NodeReader
from memtriage.observe.edges import future_referents, tensor_referents
from memtriage.observe.heap import HeapWalk
from memtriage.observe.kinds import FUTURE, NODE, SAVED, TENSOR, KindTable
from memtriage.observe.objects import tracked_objects
from memtriage.treat.compaction.plan import Movable
from memtriage.treat.device.protocol import DeviceLayout

GRAPH: Final = "a CUDA graph is alive, which may have its address"
CPP_ONLY: Final = "held by C++ only: no Python object and no autograd node leads to it"
NOT_OURS: Final = (
    "shared with another process, or its memory is not the allocator's own (IPC, DLPack, from_blob)"
)
FIXED: Final = "its storage cannot be resized"
SEVERAL: Final = "its block has more than one storage"
KEPT: Final = "asked to be kept in place"

_Tensor: Final = torch._C.TensorBase
_Storage: Final = torch.UntypedStorage
_HANDLE: Final = attrgetter("_cdata")


class StorageFinder:
    """A context manager that finds the storages of blocks, for one compaction.

    Python's heap is listed once, on entry; every tensor is kept alive until exit.
    """

    def __init__(self, keep: Iterable[torch.Tensor | torch.UntypedStorage] = ()) -> None:
        self._keep = keep
        self._objects: list[Any] | None = None
        self._heap: _Heap | None = None

    def __enter__(self) -> StorageFinder:
        self._objects = tracked_objects()
        return self

    def __exit__(self, *exception: object) -> None:
        self._objects = self._heap = None

    def __call__(self, layout: DeviceLayout, blocks: Sequence[int]) -> Movable:
        """Return the storages of some live blocks, and why the others may not move."""
        if not blocks:
            return Movable()
        # No code of a subclass or of a mode may run.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return self._find(_StorageSearch(layout, np.array(sorted(blocks), np.int64)))

    def _find(self, search: _StorageSearch) -> Movable:
        movable = Movable()
        objects = self._objects
        if self._heap is None:
            assert objects is not None, "it has not been entered"
            self._heap = _Heap(objects)
        else:
            self._objects = None  # Not after the first search: releasing them takes a while.
        if self._heap.captured:
            movable.reasons = dict.fromkeys(search.blocks.tolist(), GRAPH)
            return movable
        for some in self._heap.met:
            search.meet(some)
        if search.missing():
            for some in self._heap.hidden(objects):
                search.meet(some)
        search.judge(movable, set(chain.from_iterable(map(_kept_addresses, self._keep))))
        return movable


class _Heap:
    """The tensors, storages and CUDA graphs that Python's collector knows.

    Attributes:
        captured: a CUDA graph can be replayed; then nothing else is looked up.
        met: tensors and storages.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        graph_kinds = _classes_below(torch.cuda.CUDAGraph)
        kinds = _classes_below(torch.Tensor) | {_Storage}
        wanted = kinds | graph_kinds | {_FreezeProbe}
        listed = list(compress(objects, map(wanted.__contains__, map(type, objects))))
        ordinary = list(map(kinds.__contains__, map(type, listed)))
        known, others = list(compress(listed, ordinary)), list(compress(listed, map(not_, ordinary)))
        markers = [other for other in others if type(other) is _FreezeProbe]
        for candidate in _frozen.objects(markers, known, kinds | graph_kinds):
            (known if type(candidate) in kinds else others).append(candidate)
        self.captured = any(is_captured(other) for other in others if type(other) in graph_kinds)
        self.met = [] if self.captured else _by_address(known)
        self._known = known
        self._hidden: list[_ByAddress] | None = None

    def hidden(self, objects: Sequence[Any] | None) -> list[_ByAddress]:
        """Tensors that only tensors, autograd nodes and futures lead to."""
        if self._hidden is None:
            others = _with_referents_of_their_own(tracked_objects() if objects is None else objects)
            self._hidden = _by_address(list(_hidden(self._known, others)))
        return self._hidden


@dataclass(frozen=True, slots=True)
class _ByAddress:
    """Tensors, or storages, in order of their first bytes. So they are found faster, and the results rarely
    need sorting.

    Attributes:
        objects: in any order.
        order: indices of them.
        address: of the objects in that order.
        storage_of: returns the storage of one.
    """

    objects: list[Any]
    order: Int64s
    address: Int64s
    storage_of: Callable[[Any], Any]


def _by_address(objects: list[Any]) -> list[_ByAddress]:
    storages: list[Any] = []
    tensors = objects
    if _Storage in set(map(type, objects)):
        storages = [candidate for candidate in objects if type(candidate) is _Storage]
        tensors = [candidate for candidate in objects if type(candidate) is not _Storage]
    return [
        _sorted(tensors, _Tensor.data_ptr, _Tensor.untyped_storage),
        _sorted(storages, _Storage.data_ptr, lambda storage: storage),
    ]


def _sorted(
    objects: list[Any], address_of: Callable[[Any], int], storage_of: Callable[[Any], Any]
) -> _ByAddress:
    address = _addresses(objects, address_of)
    # An empty view has no address, but keeps its storage alive.
    for index in np.flatnonzero(address == 0).tolist():
        address[index] = _base(objects[index])
    order = np.argsort(address)
    return _ByAddress(objects, order, address[order], storage_of)


class _FreezeProbe:
    """An object that the collector lists for as long as nobody calls `gc.freeze()`."""


class _Frozen:
    """The objects frozen by `gc.freeze()`: the collector does not list them, and no others are added until
    the next call. They are looked up once, by a walk of the heap; then there are weak references to them."""

    def __init__(self) -> None:
        self._marker: _FreezeProbe | None = None
        self._known: list[weakref.ref[Any]] = []

    def objects(self, markers: Sequence[Any], listed: Sequence[Any], kinds: Set[type]) -> list[Any]:
        """Return the live objects of some classes.

        Args:
            markers: the markers that the collector lists now.
            listed: objects of these classes that it lists now: they need no look-up.
        """
        # `gc.get_freeze_count` counts them one by one, so it is called once.
        frozen = gc.get_freeze_count() > 0 if self._marker is None else self._marker not in markers
        if frozen:
            met = set(map(id, listed))
            with HeapWalk() as graph:
                self._known = [
                    weakref.ref(node) for node in graph.objects if type(node) in kinds and id(node) not in met
                ]
        if frozen or self._marker is None:
            self._marker = _FreezeProbe()
        return [one for reference in self._known if (one := reference()) is not None]


_frozen: Final = _Frozen()


class _StorageSearch:
    """Storages by block, as objects are met; in columns, because there may be tens of thousands."""

    def __init__(self, layout: DeviceLayout, blocks: Int64s) -> None:
        self.blocks = blocks[np.argsort(layout.address[blocks])]
        self._start = layout.address[self.blocks]
        self._size = layout.size[self.blocks]
        self._end = self._start + self._size
        self._met = np.zeros(len(self.blocks), bool)
        self._position: list[Int64s] = []
        self._address: list[Int64s] = []
        self._storage: list[torch.UntypedStorage] = []

    def missing(self) -> bool:
        """Whether a block has no storage yet."""
        return not self._met.all()

    def meet(self, some: _ByAddress) -> None:
        """Add those that are in one of the blocks."""
        at = np.searchsorted(self._start, some.address, side="right") - 1
        inside = (at >= 0) & (some.address < self._end[at])
        position = at[inside]
        self._met[position] = True
        self._position.append(position)
        self._address.append(some.address[inside])
        objects = map(some.objects.__getitem__, some.order[inside].tolist())
        self._storage += map(some.storage_of, objects)

    def judge(self, movable: Movable, kept: set[int]) -> None:
        """Fill in what can move and why not."""
        for block in self.blocks[~self._met].tolist():
            movable.reasons[block] = CPP_ONLY
        if not self._storage:
            return
        position, address = np.concatenate(self._position), np.concatenate(self._address)
        storages = self._storage
        handle = np.fromiter(map(_HANDLE, storages), np.uint64, len(storages))
        several = np.zeros(len(storages), bool)
        if (np.diff(position) <= 0).any():
            order = np.lexsort((address, handle, position))
            position, address, handle = position[order], address[order], handle[order]
            first = np.flatnonzero(np.diff(position, prepend=-1))
            last = np.append(first[1:], len(position)) - 1
            storages = list(map(storages.__getitem__, order[first].tolist()))
            several = handle[first] != handle[last]
            position, address, handle = position[first], address[first], handle[first]
        count = len(storages)
        sizes = np.fromiter(map(_Storage.nbytes, storages), np.int64, count)
        ours = (sizes > 0) & (sizes <= self._size[position])
        start = self._start[position]
        base = address
        owned = getattr(torch._C, "_has_Standard_Deleter", None)
        if owned is not None:
            ours &= np.fromiter(map(owned, handle.tolist()), bool, count)
        # A storage of the allocator that was met at the start of a block begins there.
        if owned is None or (address != start).any():
            base = np.fromiter(map(_Storage.data_ptr, storages), np.uint64, count).astype(np.int64)
        ours &= base == start
        obstacles = (
            (several, SEVERAL),
            (np.isin(base, list(kept)), KEPT),
            (~ours, NOT_OURS),
            (~np.fromiter(map(_Storage.resizable, storages), bool, count), FIXED),
        )
        blocks = self.blocks[position]
        hindered = np.zeros(count, bool)
        for obstacle, why in obstacles:
            if not obstacle.any():
                continue
            hindered |= obstacle
            for block in blocks[obstacle].tolist():
                movable.reasons.setdefault(block, why)
        free: Iterable[tuple[int, torch.UntypedStorage]] = zip(blocks.tolist(), storages, strict=True)
        movable.storages.update(compress(free, (~hindered).tolist()) if hindered.any() else free)


def _classes_below(root: type) -> set[type]:
    """A class and all its subclasses."""
    classes: set[type] = set()
    todo = [root]
    for kind in todo:
        if kind not in classes:
            classes.add(kind)
            todo += type.__subclasses__(kind)
    return classes


def _addresses(objects: list[Any], address_of: Callable[[Any], int]) -> Int64s:
    """Addresses of the first bytes; 0 for objects without any."""
    try:
        return np.fromiter(map(address_of, objects), np.uint64, len(objects)).astype(np.int64)
    except (RuntimeError, NotImplementedError, ReferenceError):
        return np.array([_address(candidate, address_of) for candidate in objects], np.uint64).astype(
            np.int64
        )


def _address(one: Any, address_of: Callable[[Any], int]) -> int:
    # Wrapper subclasses, sparse tensors, functorch's wrappers: their parts are separate objects.
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
    """First bytes of the storages that must stay; for a wrapper, those of its parts."""
    if hasattr(type(one), "__tensor_flatten__"):
        names, _ = one.__tensor_flatten__()
        for name in names:
            yield from _kept_addresses(getattr(one, name))
    else:
        yield int(_storage_of(one).data_ptr())


def _storage_of(one: Any) -> torch.UntypedStorage:
    return one if type(one) is _Storage else _Tensor.untyped_storage(one)


def _with_referents_of_their_own(objects: Sequence[Any]) -> list[Any]:
    """Autograd nodes, futures and saved tensors: they hold objects that the collector does not know."""
    kinds = KindTable()
    types = list(map(type, objects))
    wanted = {kind for kind in set(types) if kinds[kind] in (NODE, FUTURE, SAVED)}
    return list(compress(objects, map(wanted.__contains__, types)))


def _hidden(tensors: Sequence[Any], others: Sequence[Any]) -> Iterator[Any]:
    """Tensors that only tensors, autograd nodes and futures lead to.

    Args:
        tensors: the known ones, which are not yielded.
        others: nodes, futures, saved tensors.
    """
    kinds, reader = KindTable(), NodeReader()
    walked = (TENSOR, NODE, FUTURE, SAVED)
    queue = [holder for holder in chain(tensors, others) if kinds[type(holder)] in walked]
    met = set(map(id, tensors))
    known = set(map(id, queue))
    for holder in queue:  # It grows meanwhile, and keeps alive the objects whose addresses are in `known`.
        kind = kinds[type(holder)]
        if kind == TENSOR:
            if id(holder) not in met:
                yield holder
            more = tensor_referents(holder)
        elif kind == NODE:
            more = reader.referents(holder)
        elif kind == FUTURE:
            more = future_referents(holder)
        else:
            more = reader.saved_tensor_referents(holder)
        for other in more:
            if id(other) not in known and kinds[type(other)] in walked:
                known.add(id(other))
                queue.append(other)
