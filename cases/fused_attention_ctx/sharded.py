"""Checkpointing and FSDP around the layers, the way the issue's script does it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


def checkpointed(model: nn.Module, kind: type[nn.Module], function: Callable[..., Any]) -> None:
    """Recompute every module of this kind in backward, without reentering autograd."""
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_fn=function, use_reentrant=False)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, kind)
    )


def sharded_1(
    model: nn.Module, layer: type[nn.Module], dtype: torch.dtype, device: torch.device, group: Any
) -> nn.Module:
    """`FullyShardedDataParallel`, with the issue's settings: each layer a unit, gradients reduced in fp32."""
    return FullyShardedDataParallel(
        model,
        process_group=group,
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer}),
        device_id=device,
    )


def sharded_2(model: nn.Sequential) -> nn.Module:
    """`fully_shard`, each layer a unit."""
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)
