"""Tensors, storages and autograd nodes of another process. Addresses are those of the C++ objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from memtriage.account.native_sizes import SIZES
from memtriage.observe.tensors import StorageFacts
from memtriage.outside.memory import Words
from memtriage.outside.objects import RemoteHeap, RemoteType
from memtriage.outside.torch_layout import (
    META_WORDS,
    STORAGE_WORDS,
    TENSOR_WORDS,
    WRAPPER_WORDS,
    TorchLayout,
    class_name,
    type_name_of,
)

_MOST_EDGES: Final = 100_000
_MOST_SAVED: Final = 100_000
_NODE_SPAN: Final = 2048
"""Bytes after a node's common part in which what it saves is looked for."""
_LARGEST_STORAGE: Final = 1 << 48
_TENSOR_ENDS: Final = ("TensorImpl", "TensorWrapper", "FunctionalTensorWrapper")
_UNDEFINED: Final = "UndefinedTensorImpl"
_VIEW: Final = "DifferentiableViewMeta"
_CUSTOM: Final = "PyNode"
_LEAF: Final = "AccumulateGrad"
_FUNCTION: Final = "torch._C._FunctionBase"


@dataclass(frozen=True, slots=True)
class SavedHere:
    """What a node saves for its backward.

    Attributes:
        name, place: as `memtriage.observe.autograd.SavedValue` has them.
        tensor: address of the C++ tensor; 0 where a pack hook returned something else.
        packed: address of the Python object that a pack hook returned; 0 without one.
    """

    name: str
    place: int | None
    tensor: int
    packed: int


NodePart = Literal["next", "saved", "leaf"]
"""What a node leads to: a node that the gradient flows to next, a tensor that it saves, or its leaf."""


@dataclass(frozen=True, slots=True)
class TensorParts:
    """Addresses of what many tensors refer to; 0 where one has none.

    Attributes:
        wrappers: Python's objects.
        nodes: of `.grad_fn`.
        gradients, bases: C++ tensors.
    """

    wrappers: Words
    nodes: Words
    gradients: Words
    bases: Words


@dataclass(frozen=True, slots=True)
class LiveTensors:
    """Tensors as they are now, beside the copy. A row of zeros stands for one that is not there.

    Attributes:
        parts: what was read: addresses, and the words at each; the tensors come first.
        data, sizes: address and bytes of their storages.
    """

    parts: list[tuple[Words, Words]]
    data: Words
    sizes: Words


class TorchReader:
    """Reads torch's C++ objects.

    Attributes:
        unread: nodes whose type is not known here: what they save is not seen.
    """

    def __init__(self, heap: RemoteHeap, layout: TorchLayout) -> None:
        self._heap = heap
        self._memory = heap.memory
        self._layout = layout
        self._names: dict[int, str] = {}
        self._members_of: dict[int, list[tuple[str, int, bool]]] = {}
        self.unread: set[int] = set()

    def class_of(self, address: int) -> str:
        """Return the name of a C++ object's class; empty where there is none with virtual functions."""
        return self._class_with(self._memory.word(address))

    def _class_with(self, table: int) -> str:
        """Return the name of the class that has a table of virtual functions."""
        name = self._names.get(table)
        if name is None:
            mangled = type_name_of(self._memory.words, self._memory.text_bytes, table)
            name = self._names[table] = class_name(mangled)
        return name

    # --- tensors ---

    def tensor(self, wrapper: int) -> int:
        """Return the C++ tensor of a Python object; 0 where it has none."""
        return self.defined(self._memory.word(wrapper + self._layout.wrapper_tensor))

    def defined(self, tensor: int) -> int:
        """Return an address if a tensor is there, else 0."""
        return self._if(_is_tensor, tensor)

    def _if(self, fits: Callable[[str], object], address: int) -> int:
        """Return an address if a C++ object is there whose class has a name that fits, else 0.

        Of what was freed while the process was read, anything may be left: followed, it leads anywhere.
        """
        if address < 4096 or address & 7:
            return 0
        return address if fits(self.class_of(address)) else 0

    def wrapper(self, tensor: int) -> int:
        """Return Python's object for a tensor; 0 where it has none."""
        wrapper = self._memory.word(tensor + self._layout.tensor_wrapper) & ~1
        if wrapper and self._memory.word(wrapper + self._layout.wrapper_tensor) == tensor:
            return wrapper
        return 0

    def gradient(self, tensor: int) -> int:
        """Return `.grad`; 0 where there is none, or where the tensor is no leaf and retains none."""
        meta = self._meta(tensor)
        if not meta or (self.node(tensor) and not self._memory.byte(meta + self._layout.meta_retains)):
            return 0
        return self.defined(self._memory.word(meta + self._layout.meta_gradient))

    def node(self, tensor: int) -> int:
        """Return the node of `.grad_fn`; 0 where there is none."""
        meta = self._meta(tensor)
        return self._if(bool, self._memory.word(meta + self._layout.meta_node)) if meta else 0

    def base(self, tensor: int) -> int:
        """Return the tensor that a view is of; 0 where it is no view."""
        meta = self._meta(tensor)
        if not meta or self.class_of(meta) != _VIEW:
            return 0
        return self.defined(self._memory.word(meta + self._layout.meta_base))

    def _meta(self, tensor: int) -> int:
        return self._memory.word(tensor + self._layout.tensor_meta)

    def storage(self, tensor: int) -> StorageFacts | None:
        """Return a tensor's storage; None where it has none with memory of its own."""
        memory, layout = self._memory, self._layout
        storage = memory.word(tensor + layout.tensor_storage)
        if not storage:
            return None
        address = memory.word(storage + layout.storage_data)
        nbytes = memory.word(storage + layout.storage_size)
        device = layout.devices.get(memory.byte(storage + layout.storage_device))
        if not address or not 0 < nbytes < _LARGEST_STORAGE or device is None or device == "meta":
            return None
        if device != "cpu":
            device = f"{device}:{memory.byte(storage + layout.storage_device + 1)}"
        return StorageFacts(device, address, nbytes)

    def is_shared(self, facts: StorageFacts) -> bool:
        """Whether a storage of the host is in memory that other processes may see."""
        mapping = self._memory.mapping_at(facts.address) if facts.device == "cpu" else None
        return mapping is not None and mapping.shared

    # --- many tensors at once ---

    def tensors(self, places: Words) -> Words:
        """Return the C++ tensors of Python objects at some places; 0 where one has none."""
        return self._defined(self._memory.data[places + self._layout.wrapper_tensor // 8])

    def tensor_parts(self, tensors: Words) -> TensorParts:
        """Return what C++ tensors refer to."""
        memory, layout = self._memory, self._layout
        data, places = memory.data, memory.places(tensors)
        wrappers = data[places + layout.tensor_wrapper // 8] & ~1
        mutual = data[memory.places(wrappers) + layout.wrapper_tensor // 8] == tensors
        metas = memory.places(data[places + layout.tensor_meta // 8])
        nodes = data[metas + layout.meta_node // 8]
        retains = data[metas + layout.meta_retains // 8] >> 8 * (layout.meta_retains % 8) & 0xFF
        gradients = np.where((nodes == 0) | (retains != 0), data[metas + layout.meta_gradient // 8], 0)
        views = np.flatnonzero(self._are_named(data[metas], lambda name: name == _VIEW))
        bases = np.zeros(len(tensors), np.int64)
        bases[views] = data[metas[views] + layout.meta_base // 8]
        return TensorParts(
            np.where(mutual, wrappers, 0),
            self._where(bool, nodes),
            self._defined(gradients),
            self._defined(bases),
        )

    def leaves(self, tensors: Words) -> Words:
        """Return those of some C++ tensors that may have a gradient without a graph."""
        memory, layout = self._memory, self._layout
        metas = memory.data[memory.places(tensors) + layout.tensor_meta // 8]
        nodes = memory.data[memory.places(metas) + layout.meta_node // 8]
        found: Words = tensors[(metas != 0) & (nodes == 0)]
        return found

    def _defined(self, tensors: Words) -> Words:
        return self._where(_is_tensor, tensors)

    def _where(self, fits: Callable[[str], object], addresses: Words) -> Words:
        """Return what `_if` does, of many addresses."""
        sound = (addresses >= 4096) & (addresses & 7 == 0)
        places = self._memory.places(np.where(sound, addresses, 0))
        return np.where(self._are_named(self._memory.data[places], fits), addresses, 0)

    def _are_named(self, tables: Words, fits: Callable[[str], object]) -> npt.NDArray[np.bool_]:
        """Whether the class of each C++ object, by its table of virtual functions, has a name that fits."""
        tables, which = np.unique(tables, return_inverse=True)
        named = [table > 0 and bool(fits(self._class_with(table))) for table in tables.tolist()]
        return np.array(named, bool)[which]

    # --- as it is now, beside the copy ---

    def live_gradients(self, leaves: Words) -> tuple[Words, Words]:
        """Return where tensors have their gradients, and these, C++ tensors; 0 where one has none."""
        memory, layout = self._memory, self._layout
        metas = memory.live(leaves + layout.tensor_meta, 1)[:, 0]
        where = np.where(metas > 4096, metas + layout.meta_gradient, 0)
        return where, memory.live(where, 1)[:, 0]

    def live(self, tensors: Words) -> LiveTensors:
        """Read tensors with their storages, Python objects and autograd's parts."""
        memory, layout = self._memory, self._layout
        tensors = np.where((tensors >= 4096) & (tensors & 7 == 0), tensors, 0)
        words = memory.live(tensors, TENSOR_WORDS)
        tensors = np.where(self._are_named(words[:, 0], _is_tensor), tensors, 0)
        words[tensors == 0] = 0
        parts = [(tensors, words)]
        for offset, count in (
            (layout.tensor_storage, STORAGE_WORDS),
            (layout.tensor_wrapper, WRAPPER_WORDS),
            (layout.tensor_meta, META_WORDS),
        ):
            addresses = words[:, offset // 8] & ~1
            parts.append((addresses, memory.live(addresses, count)))
        stored = parts[1][1]
        return LiveTensors(parts, stored[:, layout.storage_data // 8], stored[:, layout.storage_size // 8])

    # --- nodes ---

    def node_of(self, wrapper: int, klass: RemoteType) -> int:
        """Return the C++ node of a Python object of a node's type; 0 where it has none (any more)."""
        offset = self._layout.function_node if _FUNCTION in klass.bases else 16
        node = self._memory.word(wrapper + offset)
        return node if node and self.node_wrapper(node) == wrapper else 0

    def node_wrapper(self, node: int) -> int:
        """Return Python's object for a node; 0 where it has none."""
        wrapper = self._memory.word(node + self._layout.node_wrapper) & ~1
        if not wrapper and self.class_of(node) == _CUSTOM:
            wrapper = self._memory.word(node + self._layout.function_wrapper) & ~1
        return wrapper

    def node_name(self, node: int) -> str:
        """Return the type of a node as Python names it."""
        name = self.class_of(node)
        if name == _CUSTOM:
            klass = self._heap.type_of(self.node_wrapper(node))
            return "CppFunction" if klass is None else klass.name
        return name if name in self._layout.node_names or name == _LEAF else "CppFunction"

    def next_nodes(self, node: int) -> list[int]:
        """Return the nodes that the gradient flows to next."""
        edges = self._vector(node + self._layout.node_edges, self._layout.edge_size)
        return [found for edge in edges if (found := self._if(bool, self._memory.word(edge)))]

    def leaf(self, node: int) -> int:
        """Return the tensor that a leaf's node accumulates into; 0 for any other node."""
        if self.class_of(node) != _LEAF:
            return 0
        return self.defined(self._memory.word(node + self._layout.leaf))

    def saved(self, node: int) -> list[SavedHere]:
        """Return what a node saves and has not freed."""
        name = self.class_of(node)
        if name == _CUSTOM:
            context = self.node_wrapper(node)
            places = self._vector(context + self._layout.function_saved, self._layout.saved_size)
            return [
                saved
                for place, address in enumerate(places[:_MOST_SAVED])
                if (saved := self._saved("", place, address)) is not None
            ]
        names = self._layout.node_names.get(name)
        if names is None:
            if name and name != _LEAF:  # without a name it was freed meanwhile
                self.unread.add(node)
            return []
        return self._members(node, names)

    # --- many nodes at once ---

    def read_alone(self, nodes: Words) -> npt.NDArray[np.bool_]:
        """Return which of some nodes must be read one by one.

        These have a Python object, a pack hook, or a type whose saved variables cannot be found yet.
        """
        memory, layout = self._memory, self._layout
        places = memory.places(nodes)
        alone: npt.NDArray[np.bool_] = memory.data[places + layout.node_wrapper // 8] & ~1 != 0
        for chosen, name, members in self._by_type(nodes, places):
            alone[chosen] |= members is None and name != _LEAF
            for _, offset, is_vector in members or ():
                tensors, hooks, which = self._saved_by(nodes[chosen], offset, is_vector=is_vector)
                alone[chosen[which[(hooks > 4096) & (tensors == 0)]]] = True
        return alone

    def node_parts(self, nodes: Words) -> Iterator[tuple[NodePart, Words, Words]]:
        """Yield what nodes not read one by one lead to: (part, addresses, which node has them)."""
        memory, layout = self._memory, self._layout
        begins, counts = self._vectors(nodes + layout.node_edges, layout.edge_size)
        following, which = memory.spans(begins, counts, layout.edge_size)
        yield "next", self._where(bool, following), which
        for chosen, name, members in self._by_type(nodes, memory.places(nodes)):
            if name == _LEAF:
                yield "leaf", self._defined(memory.data[memory.places(nodes[chosen] + layout.leaf)]), chosen
            for _, offset, is_vector in members or ():
                found, _, which = self._saved_by(nodes[chosen], offset, is_vector=is_vector)
                yield "saved", found, chosen[which]

    def node_bytes(self, nodes: Words) -> Words:
        """Return the estimated host memory of each node."""
        _, edges = self._vectors(nodes + self._layout.node_edges, self._layout.edge_size)
        saved = np.zeros(len(nodes), np.int64)
        for chosen, name, _ in self._by_type(nodes, self._memory.places(nodes)):
            saved[chosen] = len(self._layout.node_names.get(name, ()))
        return SIZES.node + SIZES.edge * edges + SIZES.saved * saved

    def _by_type(
        self, nodes: Words, places: Words
    ) -> Iterator[tuple[Words, str, list[tuple[str, int, bool]] | None]]:
        """Yield the nodes of each type, its name, and where these save tensors, if that is known."""
        tables, which = np.unique(self._memory.data[places], return_inverse=True)
        for at, table in enumerate(tables.tolist()):
            chosen, name = np.flatnonzero(which == at), self._class_with(table)
            if table not in self._members_of and name in self._layout.node_names:
                self._members(int(nodes[chosen[0]]), self._layout.node_names[name])
            yield chosen, name, self._members_of.get(table)

    def _saved_by(self, nodes: Words, offset: int, *, is_vector: bool) -> tuple[Words, Words, Words]:
        """Return (tensors, pack hooks, which node has them) of one member of nodes of one type."""
        memory, layout = self._memory, self._layout
        begins, counts = nodes + offset, np.ones(len(nodes), np.int64)
        if is_vector:
            begins, counts = self._vectors(begins, layout.saved_size)
        found, which = memory.spans(begins, counts, layout.saved_size)
        hooks, _ = memory.spans(begins + layout.saved_hooks, counts, layout.saved_size)
        return self._defined(found), hooks, which

    def _vectors(self, addresses: Words, size: int) -> tuple[Words, Words]:
        """Return where the elements of each `std::vector` begin, and how many there are."""
        data, places = self._memory.data, self._memory.places(addresses)
        begins, ends, capacities = data[places], data[places + 1], data[places + 2]
        sound = (begins > 4096) & (begins < ends) & (ends <= capacities)
        sound &= ((ends - begins) % size == 0) & ((capacities - begins) % size == 0)
        counts = np.where(sound, np.minimum((ends - begins) // size, _MOST_EDGES), 0)
        return np.where(sound, begins, 0), counts

    def _members(self, node: int, names: tuple[str, ...]) -> list[SavedHere]:
        """Find a node's saved variables, in their order.

        Each has a pointer to a tensor, that of the undefined tensor where nothing is saved (any more): so the
        members can be counted through, and each found one has the next name.
        """
        table = self._memory.word(node)
        places = self._members_of.get(table)
        if places is None:
            places = self._find_members(node, names)
            if len(places) == len(names):  # else an empty vector hides where its kind of node has it
                self._members_of[table] = places
        found: list[SavedHere | None] = []
        for name, offset, is_vector in places:
            if is_vector:
                several = self._vector(node + offset, self._layout.saved_size)[:_MOST_SAVED]
                found += [self._saved(name, place, one) for place, one in enumerate(several)]
            else:
                found.append(self._saved(name, None, node + offset))
        return [saved for saved in found if saved is not None]

    def _find_members(self, node: int, names: tuple[str, ...]) -> list[tuple[str, int, bool]]:
        """Return (name, offset in the node, whether it is a vector) of a node's saved variables."""
        found: list[tuple[str, int, bool]] = []
        size = self._layout.saved_size
        at, end = self._layout.node_size, self._layout.node_size + _NODE_SPAN
        for name in names:
            while at < end:
                if self._is_slot(node + at):
                    found.append((name, at, False))
                    at += size
                    break
                several = self._vector(node + at, size)
                if several and self._is_slot(several[0]):
                    found.append((name, at, True))
                    at += 24
                    break
                at += 8
        return found

    def _is_slot(self, address: int) -> bool:
        tensor = self._memory.word(address)
        return tensor > 4096 and not tensor & 7 and self.class_of(tensor).endswith(_TENSOR_ENDS)

    def _saved(self, name: str, place: int | None, address: int) -> SavedHere | None:
        memory, layout = self._memory, self._layout
        tensor = self.defined(memory.word(address))
        if tensor:
            return SavedHere(name, place, tensor, 0)
        hooks = memory.word(address + layout.saved_hooks)
        if hooks > 4096 and self.class_of(hooks) == "PySavedVariableHooks":
            packed = memory.word(hooks + layout.hooks_data)
            return SavedHere(name, place, 0, packed) if packed else None
        return None

    def _vector(self, address: int, size: int) -> list[int]:
        """Return the addresses of the elements of a `std::vector`; none where there is no vector."""
        begin, end, capacity = self._memory.words(address, 3) or (0, 0, 0)
        if not 4096 < begin < end <= capacity or (end - begin) % size or (capacity - begin) % size:
            return []
        count = min((end - begin) // size, _MOST_EDGES)
        return [begin + size * at for at in range(count)]


def _is_tensor(name: str) -> bool:
    return name.endswith(_TENSOR_ENDS) and name != _UNDEFINED
