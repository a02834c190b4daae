"""Estimate the host memory of autograd nodes and tensor objects, which no storage's size includes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from memtriage.observe.autograd import NodeReader, next_nodes
from memtriage.observe.classes import attributes_of, bases_of
from memtriage.observe.tensors import plain


@dataclass(frozen=True, slots=True)
class NativeSizes:
    """malloc's bytes per object.

    Measured with `mallinfo2` on x86-64 glibc and torch 2.13: what 20 more operations in a chain add, for each
    of 14 operations, and what 2,000 more tensors add. Chunk headers and alignment are included. Estimated of
    measured bytes: t 512 of 512, add 560 of 576, mul 704 of 704, exp 584 of 592, layer_norm 968 of 1,008,
    batch_norm 1,040 of 1,056, mm 864 of 863, addmm 912 of 961. On an H200 (torch 2.11) a storage needed 267
    to 278 bytes more than on the CPU in five operations, 326 and 333 in two others.

    Attributes:
        node: an autograd node without edges.
        edge: each edge to a next node.
        output: each output after the first: a split among chunks has several.
        saved: each slot for a saved tensor, filled or freed.
        shape: each saved list of sizes or strides.
        tensor: C++'s part of a tensor.
        gradient: in addition, if the tensor requires a gradient.
        storage: a storage without its data, but with the alignment of the data.
        block: in addition, what the caching allocator notes of a storage on a GPU.
        wrapper: Python's part of a tensor.
    """

    node: int = 464
    edge: int = 48
    output: int = 128
    saved: int = 72
    shape: int = 40
    tensor: int = 192
    gradient: int = 176
    storage: int = 208
    block: int = 272
    wrapper: int = 112

    def storage_on(self, device: str) -> int:
        """Bytes of a storage without its data."""
        return self.storage + (self.block if device.startswith("cuda:") else 0)


SIZES: Final = NativeSizes()


class NativeSizer:
    """Sizes the nodes and tensors of one walk.

    Args:
        reader: of the walk; it knows what each type of node saves.
    """

    def __init__(self, reader: NodeReader, sizes: NativeSizes = SIZES) -> None:
        self._reader = reader
        self._sizes = sizes
        self._by_type: dict[int, int] = {}

    def node(self, node: Any) -> int:
        """Bytes of an autograd node. All nodes of a type count the edges and outputs of the first one."""
        kind = type(node)
        nbytes = self._by_type.get(id(kind))
        if nbytes is None:
            edges, saved = len(next_nodes(node)), len(self._reader.saved_attributes(kind))
            names = {name for base in bases_of(kind) for name in attributes_of(base)}
            shapes = sum(name.endswith(("_sym_sizes", "_sym_strides")) for name in names)
            sizes = self._sizes
            outputs = max(0, len(getattr(node, "_input_metadata", ())) - 1)
            nbytes = sizes.node + sizes.edge * edges + sizes.output * outputs
            nbytes += sizes.saved * saved + sizes.shape * shapes
            self._by_type[id(kind)] = nbytes
        return nbytes

    def tensor(self, tensor: Any, *, saved: bool) -> int:
        """Bytes of a tensor object without its storage.

        Args:
            tensor: any tensor.
            saved: only a node saves it, so a Python object only exists while it is inspected.
        """
        nbytes = self._sizes.tensor + (0 if saved else self._sizes.wrapper)
        return nbytes + (self._sizes.gradient if plain(tensor).requires_grad else 0)
