"""TransformerEngine's layers for the case, and the context that its forward runs in."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

# FP8 attention is cuDNN's alone. The small operations around it run as they are: nothing is compiled first.
os.environ.setdefault("NVTE_FLASH_ATTN", "0")
os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
os.environ.setdefault("NVTE_BIAS_DROPOUT_FUSION", "0")

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common import recipe
from transformer_engine.pytorch import ops

EXPERTS = 4
AMAX_HISTORY = 32
"""As in the issue's script."""


class GroupedLinear(nn.Module):
    """Tokens dealt out over some linear layers in one grouped product, with a residual."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = te.LayerNorm(width, params_dtype=dtype)
        self.experts = te.GroupedLinear(EXPERTS, width, width, bias=False, params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).reshape(-1, x.shape[-1])
        share = [len(tokens) // EXPERTS] * EXPERTS
        return x + self.experts(tokens, share).reshape(x.shape)


class Operations(nn.Module):
    """Norm and MLP as TransformerEngine's operation fuser runs them."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.operations = ops.Sequential(
            ops.LayerNorm(width, dtype=dtype),
            ops.Linear(width, 4 * width, bias=False, dtype=dtype),
            ops.GELU(),
            ops.Linear(4 * width, width, bias=False, dtype=dtype),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operations(x)


KINDS: dict[str, type[nn.Module]] = {
    "linear": te.Linear,
    "layernorm": te.LayerNorm,
    "rmsnorm": te.RMSNorm,
    "layernormlinear": te.LayerNormLinear,
    "layernormmlp": te.LayerNormMLP,
    "multiheadattention": te.MultiheadAttention,
    "transformerlayer": te.TransformerLayer,
    "groupedlinear": GroupedLinear,
    "operations": Operations,
}
"""By `--layer-type`: the types of the issue's script, and two more that leave their list on the context."""


def make_layer(options: argparse.Namespace, dtype: torch.dtype, number: int, device: str) -> nn.Module:
    """The layer of this number, from 1; the issue's arguments. It takes (sequence, batch, width)."""
    kind = options.layer_type
    width = options.num_heads * options.head_dim
    if kind in ("groupedlinear", "operations"):
        return KINDS[kind](width, dtype).to(device)
    arguments: list[int] = [width]
    named: dict[str, Any] = {"params_dtype": dtype, "device": device}
    if kind in ("linear", "layernormlinear", "layernormmlp"):
        arguments.append(3 * width if options.num_layers == 1 else width)
        named["bias"] = True
        if kind == "layernormmlp":
            named["seq_length"] = options.seq_length
    elif kind == "multiheadattention":
        arguments.append(options.num_heads)
        named |= {"fuse_qkv_params": True, "input_layernorm": True, "attention_dropout": 0.0}
        named["layer_number"] = number
    elif kind == "transformerlayer":
        arguments += [3 * width, options.num_heads]
        named |= {"fuse_qkv_params": True, "seq_length": options.seq_length, "layer_number": number}
        named |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return KINDS[kind](*arguments, **named)


def forward_context(options: argparse.Namespace, group: Any) -> Callable[[], Any]:
    """The context of a forward: FP8 by the recipe that is asked for, or nothing."""
    if options.no_fp8:
        return contextlib.nullcontext
    attention = options.layer_type in ("multiheadattention", "transformerlayer")
    chosen = {
        "delayed": lambda: recipe.DelayedScaling(
            fp8_format=recipe.Format.HYBRID, amax_history_len=AMAX_HISTORY, amax_compute_algo="max",
            fp8_dpa=attention,
        ),
        "current": lambda: recipe.Float8CurrentScaling(fp8_dpa=attention),
        "block": recipe.Float8BlockScaling,
    }[options.recipe]()  # fmt: skip
    return functools.partial(te.fp8_autocast, enabled=True, fp8_recipe=chosen, fp8_group=group)
