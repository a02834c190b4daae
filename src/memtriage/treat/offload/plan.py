"""What a step will do, decided and checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from memtriage.treat.offload.bucket import Bucket
from memtriage.treat.offload.exchange import Exchange
from memtriage.treat.offload.kernel import Hyper
from memtriage.treat.offload.pipeline import Lane
from memtriage.treat.offload.resident import ResidentParameter


def hyper_of(group: Mapping[str, Any]) -> Hyper:
    """The settings of a parameter group as numbers. Waits for the device if one is a tensor on it."""
    beta1, beta2 = group["betas"]
    return Hyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        maximize=bool(group["maximize"]),
    )


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


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for invalid settings, with the setting's name, as `torch.optim.AdamW` does."""
    if group["amsgrad"]:
        raise ValueError("amsgrad=True is not supported: it would take 4 more bytes per parameter")
    hyper = hyper_of(group)
    for name in ("lr", "eps", "weight_decay"):
        if not getattr(hyper, name) >= 0.0:
            raise ValueError(f"{name} must not be negative, got {getattr(hyper, name)}")
    for name in ("beta1", "beta2"):
        if not 0.0 <= getattr(hyper, name) < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(hyper, name)}")


def check_not_replicated(parameter: Tensor) -> None:
    """Raise RuntimeError if a parameter's gradient may not have been averaged yet when hooks run."""
    # DDP reduces gradients after the hooks of their parameters have run.
    if not isinstance(parameter, DTensor) and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            "overlap_backward cannot be used with plain parameters on several ranks: their gradients are not "
            "averaged yet when backward hands them over. Use FSDP2 (DTensor), or process_group without it"
        )
