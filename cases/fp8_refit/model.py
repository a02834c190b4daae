"""A decoder like Llama: two billion parameters at its full size, over three kinds of linear layers.

What outlives a step in Megatron-style training is as it is there: rotary embeddings cached by length with
`lru_cache` on the method, quantized weights cached in the modules' `_fp8_workspaces`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the decoder, in elements."""

    layers: int = 20
    hidden: int = 2560
    heads: int = 20
    groups: int = 4
    ffn: int = 8192
    vocabulary: int = 128_256

    @property
    def head(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Width of queries, keys and values together."""
        return (self.heads + 2 * self.groups) * self.head


TINY = Shape(layers=2, hidden=64, heads=4, groups=2, ffn=128, vocabulary=512)


class Blocks(Protocol):
    """Makes the parts of a layer that training in FP8 replaces. Each takes `(x, first)`."""

    def norm_linear(self, width: int, out: int) -> nn.Module:
        """RMSNorm and a linear layer: `first` tells the first micro-batch after an optimizer step."""
        ...

    def linear(self, width: int, out: int) -> nn.Module:
        """A linear layer."""
        ...

    def norm_mlp(self, width: int, inner: int) -> nn.Module:
        """RMSNorm and a gated MLP."""
        ...


class RotaryEmbedding(nn.Module):
    """Angles of the rotary embedding, kept by length as Megatron's `RotaryEmbedding` keeps them."""

    def __init__(self, head: int, device: torch.device, base: float = 500_000.0) -> None:
        super().__init__()
        inverse = 1.0 / base ** (torch.arange(0, head, 2, dtype=torch.float32, device=device) / head)
        self.register_buffer("inverse", inverse, persistent=False)

    @functools.lru_cache(maxsize=32)  # noqa: B019 - that it outlives the step is the case
    def forward(self, length: int) -> Tensor:
        """Angles, `[length, head]` in fp32."""
        angles = torch.outer(torch.arange(length, device=self.inverse.device).float(), self.inverse)
        return torch.cat((angles, angles), dim=-1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary embeddings to `[sequences, length, heads, head]`."""
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm and with a residual."""

    def __init__(self, shape: Shape, blocks: Blocks) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = blocks.norm_linear(shape.hidden, shape.qkv)
        self.projection = blocks.linear(shape.hidden, shape.hidden)
        self.mlp = blocks.norm_mlp(shape.hidden, shape.ffn)

    def forward(self, x: Tensor, angles: Tensor, first: bool) -> Tensor:
        """`[sequences, length, hidden]` to the same."""
        size = self.shape
        mixed = self.qkv(x, first).unflatten(-1, (size.heads + 2 * size.groups, size.head))
        queries, keys, values = mixed.split((size.heads, size.groups, size.groups), dim=2)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            attended = F.scaled_dot_product_attention(
                rotate(queries, angles).transpose(1, 2),
                rotate(keys, angles).transpose(1, 2),
                values.transpose(1, 2),
                is_causal=True,
                enable_gqa=True,
            )
        x = x + self.projection(attended.transpose(1, 2).flatten(2), first)
        return x + self.mlp(x, first)


class Decoder(nn.Module):
    """Tokens to logits. Embedding and output layer stay in bf16 in every variant."""

    def __init__(self, shape: Shape, blocks: Blocks, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, device=device, dtype=dtype)
        self.rotary = RotaryEmbedding(shape.head, device)
        self.layers = nn.ModuleList(Layer(shape, blocks) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, device=device, dtype=dtype)
        self.output = nn.Linear(shape.hidden, shape.vocabulary, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, tokens: Tensor, first: bool) -> Tensor:
        """`[sequences, length]` to `[sequences, length, vocabulary]`."""
        x = self.embedding(tokens)
        angles = self.rotary(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, angles, first)
        return self.output(self.norm(x))
