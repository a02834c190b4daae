"""A transformer layer whose attention saves its operands quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from twin.quantized import Quantized, prepare_for_saving, restore_from_saved


class FusedAttnFunc(torch.autograd.Function):
    """Attention whose backward reads eight-bit copies of q, k, v and the output."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fp8: bool) -> torch.Tensor:
        kept: list[Any] = [Quantized(operand) for operand in (q, k, v)] if fp8 else [q, k, v]
        operands = [tensor.dequantize() for tensor in kept] if fp8 else kept
        out = functional.scaled_dot_product_attention(*operands, is_causal=True)
        parts, ctx.tensor_objects = prepare_for_saving(*kept, Quantized(out) if fp8 else out)
        ctx.save_for_backward(*parts)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Here TransformerEngine before 2.15 leaves the list on the context.
        *operands, _ = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
        with torch.enable_grad():
            sources = [
                (
                    operand.dequantize() if isinstance(operand, Quantized) else operand.detach()
                ).requires_grad_()
                for operand in operands
            ]
            out = functional.scaled_dot_product_attention(*sources, is_causal=True)
        return (*torch.autograd.grad(out, sources, gradients[0]), None)


class MultiheadAttention(nn.Module):
    """Norm and attention with a residual. Takes and gives (sequence, batch, heads * head size)."""

    def __init__(self, heads: int, head_dim: int, *, fp8: bool) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads, self.fp8 = heads, fp8
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence, batch, width = x.shape
        qkv = self.qkv(self.norm(x)).view(sequence, batch, 3, self.heads, -1).permute(2, 1, 3, 0, 4)
        attended = FusedAttnFunc.apply(*qkv, self.fp8).permute(2, 0, 1, 3).reshape(sequence, batch, width)
        return x + self.projection(attended)


class TransformerLayer(nn.Module):
    """Attention, norm, and an MLP three times as wide, as the issue's script has it."""

    def __init__(self, heads: int, head_dim: int, *, fp8: bool) -> None:
        super().__init__()
        width = heads * head_dim
        self.attention = MultiheadAttention(heads, head_dim, fp8=fp8)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return x + self.mlp(self.norm(x))
