"""TransformerEngine's layers for the case, and the context that its forward runs in."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import Any

# FP8 attention is cuDNN's alone.
os.environ.setdefault("NVTE_FLASH_ATTN", "0")

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common import recipe
from transformer_engine.pytorch import ops

EXPERTS = 4


class Experts(nn.Module):
    """Tokens dealt out over some linear layers in one grouped product, with a residual."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = te.LayerNorm(width, params_dtype=dtype)
        self.experts = te.GroupedLinear(EXPERTS, width, width, bias=False, params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).reshape(-1, x.shape[-1])
        share = [len(tokens) // EXPERTS] * EXPERTS
        return x + self.experts(tokens, share).reshape(x.shape)


def layer_maker(options: argparse.Namespace, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """Makes a layer of the type that is asked for. Layers take (sequence, batch, width)."""
    width = options.heads * options.head_size

    def transformer() -> nn.Module:
        return te.TransformerLayer(
            width, 4 * width, options.heads, params_dtype=dtype, hidden_dropout=0.0, attention_dropout=0.0,
            self_attn_mask_type="causal", fuse_qkv_params=True,
        )  # fmt: skip

    def operations() -> nn.Module:
        return ops.Sequential(
            ops.LayerNorm(width, dtype=dtype),
            ops.Linear(width, 4 * width, bias=False, dtype=dtype),
            ops.GELU(),
            ops.Linear(4 * width, width, bias=False, dtype=dtype),
        )

    makers = {"transformer": transformer, "grouped": lambda: Experts(width, dtype), "operations": operations}
    return makers[options.layer_type]


def context_maker(options: argparse.Namespace) -> Callable[[], Any]:
    """The context of a forward: FP8 by the recipe that is asked for, or nothing."""
    if options.no_fp8:
        return contextlib.nullcontext
    attention = options.layer_type == "transformer"
    chosen = {
        "delayed": lambda: recipe.DelayedScaling(fp8_dpa=attention, fp8_mha=attention),
        "current": lambda: recipe.Float8CurrentScaling(fp8_dpa=attention),
        "block": recipe.Float8BlockScaling,
    }[options.recipe]()
    return lambda: te.fp8_autocast(enabled=True, fp8_recipe=chosen)


def checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layer under TransformerEngine's own checkpointing, which knows FP8's state."""
    return te.checkpoint(layer, x, use_reentrant=False)
