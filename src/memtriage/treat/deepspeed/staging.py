"""Send the weights to the device through two small tiles instead of a 16-bit copy of the partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from memtriage.treat.deepspeed.internals import GRADIENT_BUFFER, STAGING
from memtriage.treat.offload.pinned import host_memory, locked_memory

TILE_BYTES: Final = 8 << 20
"""A copy takes long compared with starting it and the CPU's threads (8 MiB take 0.15 ms at 55 GB/s), and a
tile is small compared with any model."""

_TILES: Final = 2


class Tiles:
    """Two tiles that alternate: one is filled while the other is being copied."""

    def __init__(self, tile_bytes: int = TILE_BYTES) -> None:
        self._tile_bytes = tile_bytes
        self._memory: Tensor | None = None
        self._left: list[torch.cuda.Event | None] = [None] * _TILES

    def send(self, source: Tensor, target: Tensor) -> None:
        """Write `source`, rounded to the type of `target`, to the device.

        The copies are in order on the device's current stream. `Tensor.copy_` rounds each element separately,
        so tiles do not change the result.

        Args:
            source: one-dimensional, on the CPU.
            target: of the same length, on any device.
        """
        if target.device.type == "cpu":
            target.copy_(source)
        else:
            self.stream(source, target)

    def stream(self, source: Tensor, target: Tensor) -> None:
        """`send` tile by tile, to any device."""
        tiles = self._tiles(target)
        length = tiles[0].numel()
        for number, start in enumerate(range(0, source.numel(), length)):
            turn = number % _TILES
            part = source[start : start + length]
            self._wait(turn)
            tile = tiles[turn][: part.numel()]
            tile.copy_(part)
            target[start : start + length].copy_(tile, non_blocking=target.is_cuda)
            if target.is_cuda:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(target.device))
                self._left[turn] = event

    def _tiles(self, target: Tensor) -> Sequence[Tensor]:
        if self._memory is None:
            nbytes = _TILES * self._tile_bytes
            locked = locked_memory(nbytes) if target.is_cuda else None
            self._memory = host_memory(nbytes) if locked is None else locked
        tiles: tuple[Tensor, ...] = self._memory.view(target.dtype).chunk(_TILES)
        return tiles

    def _wait(self, turn: int) -> None:
        left = self._left[turn]
        if left is not None:
            left.synchronize()
            self._left[turn] = None


class Streamed:
    """Replaces the 16-bit copy of one partition: what is copied into it is sent on in tiles.

    DeepSpeed copies the master weights into its staging copy, and that to the device. Here the first copy is
    only noted, and the second does both. Anything else raises, so that nothing is silently wrong.

    Attributes:
        shape, dtype: of the copy that it replaces.
    """

    def __init__(self, replaced: Tensor, tiles: Tiles) -> None:
        self.shape: torch.Size = replaced.shape
        self.dtype: torch.dtype = replaced.dtype
        self._tiles = tiles
        self._source: Tensor | None = None

    @property
    def data(self) -> Streamed:
        """Itself, because `Tensor.data` shares its memory."""
        return self

    @property
    def nbytes(self) -> int:
        """Size of the copy that it replaces."""
        size: int = self.shape.numel() * self.dtype.itemsize
        return size

    def data_ptr(self) -> int:
        """The null address: DeepSpeed's native pinning reads it when an engine is destroyed."""
        return 0

    def copy_(self, source: Tensor) -> Streamed:
        """Note what the next copy from this one will send.

        Raises:
            ValueError: the shape differs.
        """
        if source.shape != self.shape:
            raise ValueError(f"a partition of {tuple(source.shape)} was given, expected {tuple(self.shape)}")
        self._source = source
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """`target.copy_(self)`, blocking or not.

        Raises:
            TypeError: any other use.
        """
        if func.__name__ != "copy_" or len(args) != 2 or not isinstance(args[1], cls):
            raise TypeError(
                f"DeepSpeed's staging copy, which memtriage has replaced, was used in an unknown way "
                f"({func.__name__}): train without deepspeed_exact_host_memory(), and please report it"
            )
        target, stand_in = args
        stand_in._send(target)
        return target

    def _send(self, target: Tensor) -> None:
        if self._source is None:
            raise RuntimeError("DeepSpeed sends its staging copy before it has written to it")
        self._tiles.send(self._source, target)
        self._source = None


def slim(optimizer: Any, tiles: Tiles, *, drop_buffer: bool) -> tuple[int, int]:
    """Replace staging copies by `Streamed`, and the unused buffer by an empty tensor.

    Returns:
        Bytes of the staging copies, and elements of the buffer.
    """
    copies = getattr(optimizer, STAGING)
    copies[:] = [Streamed(copy, tiles) for copy in copies]
    buffer = getattr(optimizer, GRADIENT_BUFFER, None)
    elements = 0
    if drop_buffer and isinstance(buffer, Tensor):
        elements = buffer.numel()
        setattr(optimizer, GRADIENT_BUFFER, buffer.new_empty(0))
    return sum(copy.nbytes for copy in copies), elements


def restore(optimizer: Any, accelerator: Any, elements: int) -> None:
    """Restore what `slim` removed."""

    def made(shape: Any, dtype: torch.dtype) -> Tensor:
        memory = torch.zeros(shape, dtype=dtype)
        return accelerator.pin_memory(memory) if optimizer.cpu_offload_pin_memory else memory

    copies = getattr(optimizer, STAGING)
    copies[:] = [made(copy.shape, copy.dtype) if isinstance(copy, Streamed) else copy for copy in copies]
    if elements:
        buffer = getattr(optimizer, GRADIENT_BUFFER)
        setattr(optimizer, GRADIENT_BUFFER, made(elements, buffer.dtype))
