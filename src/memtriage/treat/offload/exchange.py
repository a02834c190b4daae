"""The partition over a process group: gradients are summed on the rank that owns them, weights go to all.

Every collective is called tile by tile, in an order that only depends on the parameters, so that all ranks
call the same ones. The global norm of gradients is taken over all of them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from memtriage.treat.offload.pipeline import Lane
from memtriage.treat.offload.resident import ResidentParameter
from memtriage.treat.offload.tiles import TilePiece


def _collective(new: str, old: str) -> Callable[..., Any]:
    """A collective: torch 2.13 renamed them, and the old names warn there."""
    function: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return function


_reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
_all_gather = _collective("all_gather_single", "all_gather_into_tensor")


class Exchange:
    """The collectives of one optimizer over its group, with their scratch on the device.

    In each direction, the scratch takes one tile per rank, and one more.
    """

    def __init__(self, group: dist.ProcessGroup, tile: int) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._tile = tile
        self._scratch: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def agree(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Whether any rank has each flag set. The host waits for the result."""
        votes = torch.tensor(flags, dtype=torch.uint8, device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in votes.tolist()]

    def reduce(
        self,
        lane: Lane,
        pieces: Sequence[TilePiece],
        residents: Sequence[ResidentParameter],
        flats: Sequence[Tensor],
    ) -> Tensor:
        """This rank's pieces of a tile, summed over the ranks; valid for work on the way down.

        Args:
            lane: to the device of the gradients.
            residents: by `Piece.index`; their weights have one type, in which the sum is taken.
            flats: local gradients in memory order, by `Piece.index`.
        """
        dtype, used = residents[0].dtype, pieces[-1].end
        with lane.down():
            rows = self._room("down", lane.device, dtype, self.ranks)[: self.ranks * used].view(-1, used)
            mine = self._room("sum", lane.device, dtype, 1)[:used]
            rows.zero_()
            for piece in pieces:
                for rank in range(self.ranks):
                    first, last = residents[piece.index].share.span(piece.start, piece.stop, rank)
                    rows[rank, piece.at : piece.at + last - first].copy_(flats[piece.index][first:last])
            _reduce_scatter(mine, rows.view(-1), group=self.group)
        return mine

    def spread(
        self,
        lane: Lane,
        pieces: Sequence[TilePiece],
        residents: Sequence[ResidentParameter],
        mine: Tensor,
        flats: Sequence[Tensor],
    ) -> None:
        """Gather all ranks' pieces of a tile into `flats`; work on the way up.

        Args:
            mine: this rank's tile on the device, elements `[0, pieces[-1].end)` used.
            flats: where each parameter's elements go, in memory order, by `Piece.index`.
        """
        rows = self.gather(lane, mine[: pieces[-1].end])
        with lane.up():
            for piece in pieces:
                for rank in range(self.ranks):
                    first, last = residents[piece.index].share.span(piece.start, piece.stop, rank)
                    flats[piece.index][first:last].copy_(rows[rank, piece.at : piece.at + last - first])

    def gather(self, lane: Lane, mine: Tensor) -> Tensor:
        """All ranks' `mine`, one row per rank; work on the way up, valid until the next call."""
        with lane.up():
            used = mine.numel()
            rows = self._room("up", lane.device, mine.dtype, self.ranks)[: self.ranks * used].view(-1, used)
            _all_gather(rows.view(-1), mine, group=self.group)
        return rows

    def room_to_send(self, lane: Lane, dtype: torch.dtype) -> Tensor:
        """A tile on the device for what this rank contributes to `spread`; work on the way up."""
        with lane.up():
            return self._room("own", lane.device, dtype, 1)

    def _room(self, use: str, device: torch.device, dtype: torch.dtype, tiles: int) -> Tensor:
        key = (use, device, dtype)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(tiles * self._tile, dtype=dtype, device=device)
        return self._scratch[key]

    def close(self) -> None:
        """Free the scratch."""
        self._scratch.clear()


_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def total_norm(parts: Iterable[tuple[ResidentParameter, Tensor]], exchange: Exchange | None) -> Tensor:
    """The 2-norm over all parameters as a float32 scalar; each element counts once.

    Without a partition it is bit-identical to `torch.nn.utils.get_total_norm` of float32 gradients.

    Args:
        parts: this rank's part of each parameter's gradient: its share of a partition, its shard.
    """
    by_layout: dict[Any, list[Tensor]] = {}
    layouts: dict[Any, DTensor | None] = {}
    home: torch.device | None = None
    for resident, gradient in parts:
        parameter = resident.parameter
        home = home or parameter.device
        sharded = parameter if isinstance(parameter, DTensor) else None
        key = None if sharded is None else (sharded.device_mesh, sharded.placements)
        layouts[key] = sharded
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        by_layout.setdefault(key, []).append(norm.to(home))
    if home is None:
        return torch.zeros(())
    totals = []
    for key, norms in by_layout.items():
        norm = torch.linalg.vector_norm(torch.stack(norms))
        totals.append(_over_ranks(norm, layouts[key], exchange))
    return totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals))


def clip_factor(norm: float, limit: float) -> float:
    """The factor that `torch.nn.utils.clip_grad_norm_` multiplies gradients by, to float32 precision.

    >>> clip_factor(1.0, 2.0)
    1.0
    """
    return float(torch.clamp(limit / (torch.tensor(norm, dtype=torch.float32) + _EPSILON), max=1.0))


def _over_ranks(norm: Tensor, sharded: DTensor | None, exchange: Exchange | None) -> Tensor:
    groups = [] if exchange is None else [exchange.group]
    if sharded is not None:
        groups += [
            sharded.device_mesh.get_group(dimension)
            for dimension, placement in enumerate(sharded.placements)
            if placement.is_shard()
        ]
    if not groups:
        return norm
    squared = norm.square()
    for group in groups:
        dist.all_reduce(squared, group=group)
    return squared.sqrt()
