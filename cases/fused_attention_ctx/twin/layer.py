"""A transformer layer whose attention saves its operands quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from twin.quantised import Quantised, prepare_for_saving, restore_from_saved


class FusedAttnFunc(torch.autograd.Function):
    """Attention whose backward reads eight-bit copies of q, k, v and the output."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fp8: bool) -> torch.Tensor:
        kept: list[Any] = [Quantised(one) for one in (q, k, v)] if fp8 else [q, k, v]
        operands = [one.dequantise() for one in kept] if fp8 else kept
        out = functional.scaled_dot_product_attention(*operands, is_causal=True)
        parts, ctx.tensor_objects = prepare_for_saving(*kept, Quantised(out) if fp8 else out)
        ctx.save_for_backward(*parts)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Here TransformerEngine before 2.15 leaves the list on the context.
        *operands, _ = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
        with torch.enable_grad():
            sources = [
                (one.dequantise() if isinstance(one, Quantised) else one.detach()).requires_grad_()
                for one in operands
            ]
            out = functional.scaled_dot_product_attention(*sources, is_causal=True)
        return (*torch.autograd.grad(out, sources, gradients[0]), None)


class TransformerLayer(nn.Module):
    """Norm, attention, norm, MLP, with residuals. Takes and gives (batch, sequence, heads * head size)."""

    def __init__(self, heads: int, head_size: int, *, fp8: bool) -> None:
        super().__init__()
        width = heads * head_size
        self.heads, self.fp8 = heads, fp8
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = FusedAttnFunc.apply(*qkv, self.fp8).transpose(1, 2).reshape(batch, sequence, width)
        x = x + self.projection(attended)
        return x + self.mlp(self.norm_2(x))
