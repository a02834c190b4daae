"""The arithmetic of tiles: which elements of which parameters travel together, and to which rank they belong.

Torch's fused AdamW works on vectors of 8 or 16 elements, and finishes a tensor's last, incomplete vector with
scalar code, whose results can differ in the last bits. If pieces start at multiples of 64 elements of the
parameter, and have such a multiple as length unless the parameter ends there, every element is processed by
the same kind of code as in one call over the whole parameter. That also holds for the shares of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

ALIGNMENT: Final = 64
"""Elements. A multiple of the longest vector (16 floats) that is also a whole cache line in bfloat16."""


def aligned(count: int) -> int:
    """The next multiple of `ALIGNMENT`.

    >>> aligned(0), aligned(1), aligned(64), aligned(65)
    (0, 64, 64, 128)
    """
    return -(-count // ALIGNMENT) * ALIGNMENT


NARROW: Final = 2  # bytes of an element of bfloat16 or float16
WIDE: Final = 4  # of float32, the widest that travels


def room(elements: int) -> int:
    """Bytes that hold a tile of `elements` narrow elements, or one block of wide ones.

    >>> room(64), room(4096)
    (256, 8192)
    """
    return max(elements * NARROW, ALIGNMENT * WIDE)


def capacity(elements: int, itemsize: int) -> int:
    """Elements of `itemsize` bytes that fit into a tile, a multiple of `ALIGNMENT`; fewer if they are wide.

    >>> capacity(4096, 2), capacity(4096, 4), capacity(320, 4), capacity(64, 2), capacity(64, 4)
    (4096, 2048, 128, 64, 64)
    """
    return min(elements, room(elements) // itemsize // ALIGNMENT * ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Share:
    """How a parameter's elements are divided: each rank has one run of `chunk`, the last ones possibly fewer.

    Attributes:
        numel: elements of the parameter.
        ranks: how many share it; 1 if it is not partitioned.
        rank: whose share this is.
    """

    numel: int
    ranks: int = 1
    rank: int = 0

    @property
    def chunk(self) -> int:
        """Elements per rank, rounded up to a multiple of `ALIGNMENT`; equal for all ranks."""
        return aligned(-(-self.numel // self.ranks))

    @property
    def length(self) -> int:
        """Elements that this rank has; 0 if the parameter is too small for all ranks."""
        first, last = self.span(0, self.chunk)
        return last - first

    def span(self, start: int, stop: int, rank: int | None = None) -> tuple[int, int]:
        """Where `[start, stop)` of a rank's chunk is in the parameter, cut off at the parameter's end."""
        before = (self.rank if rank is None else rank) * self.chunk
        return min(before + start, self.numel), min(before + stop, self.numel)


@dataclass(frozen=True, slots=True)
class TilePiece:
    """A part of one parameter's chunk, and its place in a tile; all in elements.

    Attributes:
        index: number of the parameter, from the caller of `pack`.
        start, stop: the part of the chunk.
        at: where it begins in the tile.
    """

    index: int
    start: int
    stop: int
    at: int

    @property
    def end(self) -> int:
        """Where the piece ends in the tile."""
        return self.at + self.stop - self.start


def pack(chunks: Sequence[int], capacity: int) -> Iterator[tuple[TilePiece, ...]]:
    """Tiles of at most `capacity` elements that cover all chunks in order; small ones share a tile.

    Args:
        chunks: lengths, multiples of `ALIGNMENT`; zeros are left out.
        capacity: of a tile, a multiple of `ALIGNMENT`.
    """
    tile: list[TilePiece] = []
    used = 0
    for index, chunk in enumerate(chunks):
        start = 0
        while start < chunk:
            stop = min(chunk, start + capacity - used)
            tile.append(TilePiece(index, start, stop, used))
            used += stop - start
            start = stop
            if used == capacity:
                yield tuple(tile)
                tile, used = [], 0
    if tile:
        yield tuple(tile)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, detached: the shard of a `DTensor`, any other tensor as it is."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory without gaps or repetitions, in whatever order."""
    # empty_like keeps the strides of exactly such tensors.
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())


def memory_order(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in the order of memory, as a one-dimensional view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def ordered_as(tensor: Tensor, pattern: Tensor) -> Tensor:
    """The elements of `tensor`, of the same shape as `pattern`, in the memory order of `pattern`.

    A view if the strides agree, else of a copy on the same device. `pattern` must be dense.
    """
    if tensor.stride() != pattern.stride():
        tensor = torch.empty_strided(
            pattern.shape, pattern.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return memory_order(tensor)


def like_parameter(local_part: Tensor, parameter: Tensor) -> Tensor:
    """Host memory laid out as the local part of `parameter`, as a `DTensor` if the parameter is one."""
    if not isinstance(parameter, DTensor):
        return local_part
    # As FSDP2 does for its CPU offload: DTensor.from_local would move the shard to the mesh's device.
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(parameter.shape, parameter.stride(), local_part.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    wrapped: Tensor = DTensor(local_part, spec, requires_grad=False)
    return wrapped
