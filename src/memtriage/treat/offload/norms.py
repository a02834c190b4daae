"""The global norm of gradients with parts on the host or on devices, of this rank and of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from memtriage.treat.offload.exchange import Exchange
from memtriage.treat.offload.resident import ResidentParameter

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
