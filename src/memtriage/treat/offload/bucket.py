"""Parameters that go through the ring together: one group, one device, one type of gradient and of weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memtriage.treat.offload.pipeline import Lane
from memtriage.treat.offload.resident import ResidentParameter
from memtriage.treat.offload.tiles import TilePiece, capacity, pack


@dataclass(frozen=True, slots=True)
class RankPart:
    """This rank's part of a piece, never empty, as slices of the three places where it is.

    Attributes:
        index: number of the parameter in the bucket.
        device: slice of the parameter's elements in memory order.
        host: slice of the rank's share of them.
        tile: slice of the tile's buffer.
    """

    index: int
    device: slice
    host: slice
    tile: slice


@dataclass(frozen=True, slots=True)
class Tile:
    """What goes through a slot of the ring at once.

    Attributes:
        pieces: the same on every rank.
        parts: this rank's parts of the pieces.
        used: used elements at the start of the buffer, including gaps between pieces.
    """

    pieces: tuple[TilePiece, ...]
    parts: tuple[RankPart, ...]
    used: int


@dataclass(slots=True)
class Bucket:
    """Parameters of one kind, with their tensors on the device, and their tiles.

    Attributes:
        group: index of the parameter group.
        lane: to their device.
        residents: what the host keeps for each.
        weights: local weights on the device in memory order, for each.
        gradients: the same for the gradients; empty if they are on the host.
        travels_as: type of the gradients in the ring; None if they are on the host.
        reduced: whether this rank's part of `gradients` holds the sum over the ranks.
        tiles: see `cut`.
    """

    group: int
    lane: Lane
    travels_as: torch.dtype | None = None
    residents: list[ResidentParameter] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    reduced: bool = True
    tiles: list[Tile] = field(default_factory=list)

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.residents[0].dtype

    def cut(self, elements: int) -> None:
        """Make the tiles for a ring's number of elements, once."""
        chunks = [resident.share.chunk for resident in self.residents]
        traveling = (self.weight_dtype, self.travels_as or self.weight_dtype)
        most = capacity(elements, max(dtype.itemsize for dtype in traveling))
        self.tiles = [
            Tile(pieces, tuple(self._parts(pieces)), pieces[-1].end) for pieces in pack(chunks, most)
        ]

    def _parts(self, pieces: Iterable[TilePiece]) -> Iterator[RankPart]:
        for piece in pieces:
            first, last = self.residents[piece.index].share.span(piece.start, piece.stop)
            length = last - first
            if length:
                yield RankPart(
                    piece.index,
                    device=slice(first, last),
                    host=slice(piece.start, piece.start + length),
                    tile=slice(piece.at, piece.at + length),
                )


def on_device(flats: Sequence[Tensor], tile: Tile) -> list[Tensor]:
    """The parts in the bucket's tensors on the device (the weights or the gradients)."""
    return [flats[part.index][part.device] for part in tile.parts]


def on_host(bucket: Bucket, name: str, tile: Tile) -> list[Tensor]:
    """The parts in the host's tensors of that name (`master`, `exp_avg`, ...), one per parameter."""
    return [getattr(bucket.residents[part.index], name)[part.host] for part in tile.parts]


def in_tile(buffer: Tensor, tile: Tile) -> list[Tensor]:
    """The parts in a tile's buffer."""
    return [buffer[part.tile] for part in tile.parts]
