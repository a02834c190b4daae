"""Names the buffers of both FSDPs and DDP while they are allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from memtriage.prediction.fake_cuda.stand_ins import around, replaced
from memtriage.prediction.lifetimes import Lifetimes

COMMUNICATION: Final = "communication buffer"
UNSHARDED: Final = "unsharded parameter"


def replacements(lifetimes: Lifetimes) -> list[tuple[Any, str, Any]]:
    """What allocates them, as attributes to replace for the time of a trace."""
    allocators: list[tuple[Any, str, str]] = [
        (_fsdp_param_group, "foreach_all_gather", COMMUNICATION),
        (_fsdp_collectives.DefaultAllGather, "allocate", COMMUNICATION),
        (_fsdp_collectives.DefaultReduceScatter, "allocate", COMMUNICATION),
        (_fsdp_param.FSDPParam, "init_all_gather_outputs", UNSHARDED),
        (_fsdp_param.FSDPParam, "alloc_all_gather_outputs", UNSHARDED),
        (_flat_param.FlatParamHandle, "_alloc_padded_unsharded_flat_param", UNSHARDED),
        (_flat_param.FlatParamHandle, "_use_low_precision_shard", COMMUNICATION),
        (_runtime_utils, "_get_reduce_scatter_tensors", COMMUNICATION),
        (DistributedDataParallel, "_ddp_init_helper", COMMUNICATION),
        (dist.Reducer, "_rebuild_buckets", COMMUNICATION),
    ]
    return [
        (owner, name, around(getattr(owner, name), _owned, kind, lifetimes))
        for owner, name, kind in allocators
        if hasattr(owner, name)  # not every version of torch has all of them
    ]


def _owned(kind: str, lifetimes: Lifetimes, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with replaced(lifetimes, "owner", kind):
        return original(*args, **kwargs)
