"""Parameters that go through the ring together: one group, one device, one type of gradient and of weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memtriage.treat.offload.exchange import Exchange
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


def with_gradients(
    members: Iterable[tuple[int, ResidentParameter]], exchange: Exchange | None
) -> list[tuple[int, ResidentParameter, Tensor]]:
    """The parameters with a gradient on the device on any rank, and this rank's gradient (zeros if none).

    Args:
        members: each parameter after the index of its group.
        exchange: the partition; all of its ranks must call this.

    Raises:
        RuntimeError: a gradient cannot be used.
    """
    candidates = [(group, resident, resident.device_gradient()) for group, resident in members]
    if exchange is None or not candidates:
        return [
            (group, resident, gradient) for group, resident, gradient in candidates if gradient is not None
        ]
    anywhere = exchange.agree(
        [gradient is not None for _, _, gradient in candidates], candidates[0][1].parameter.device
    )
    return [
        (group, one, torch.zeros_like(one.weights()) if gradient is None else gradient)
        for (group, one, gradient), there in zip(candidates, anywhere, strict=True)
        if there
    ]


def buckets_of(
    members: Iterable[tuple[int, ResidentParameter, Tensor | None]],
    lane_to: Callable[[torch.device], Lane],
    elements: int,
    *,
    reduced: bool,
) -> list[Bucket]:
    """Sort parameters into buckets, and cut these into tiles, in the given order, the same on every rank.

    Args:
        members: group index, parameter, and its gradient on the device if that is to be copied.
        reduced: whether the gradients need no sum over ranks.

    Raises:
        RuntimeError: weights have changed in shape, type or strides, or their memory is gone.
    """
    buckets: dict[tuple[Any, ...], Bucket] = {}
    for group, resident, gradient in members:
        weights = resident.weights()
        # Sums over ranks are taken in the weights' type, whatever type a rank's gradient has.
        travels_as = None if gradient is None else gradient.dtype if reduced else weights.dtype
        key = (group, weights.device, weights.dtype, travels_as)
        bucket = buckets.get(key)
        if bucket is None:
            bucket = buckets[key] = Bucket(group, lane_to(weights.device), travels_as, reduced=reduced)
        bucket.residents.append(resident)
        bucket.weights.append(weights)
        if gradient is not None:
            bucket.gradients.append(gradient)
    for bucket in buckets.values():
        bucket.cut(elements)
    return list(buckets.values())


def own_parts(buckets: Iterable[Bucket]) -> Iterator[tuple[ResidentParameter, Tensor]]:
    """This rank's part of each parameter's gradient, wherever it is."""
    for bucket in buckets:
        for index, resident in enumerate(bucket.residents):
            if resident.gradient is not None:
                yield resident, resident.gradient
            else:
                first, last = resident.share.span(0, resident.share.chunk)
                yield resident, bucket.gradients[index][first:last]
