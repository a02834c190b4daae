"""Programs whose peaks are in known places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.training import training

WIDTH = 256


@pytest.fixture(autouse=True, scope="module")
def quick_looks(imported_stays_out: None) -> None:
    """See `imported_stays_out`."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    """Residual blocks in a list."""

    def __init__(self, width: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def program(model_of, micro_batch, width=WIDTH, dtype=torch.float32):
    """A build function with a keyword for the batch."""

    def build(device, micro_batch=micro_batch):
        model = model_of().to(device, dtype)
        return training(
            model,
            lambda: model(torch.randn(micro_batch, 64, width, dtype=dtype, device=device)).sum(),
            torch.optim.AdamW,
        )

    return build


@pytest.fixture
def activations() -> Callable[..., Any]:
    """A program whose peak is activations, with a keyword for the batch."""
    return program(Net, 64)


@pytest.fixture
def activations_fixed(activations) -> Callable[[Any], Any]:
    """The same without a keyword."""
    return lambda device: activations(device)


def layer(size, dtype=torch.float32):
    """A program of one square layer, whose peak is the optimizer step."""

    def build(device):
        model = nn.Linear(size, size, bias=False, dtype=dtype).to(device)
        return training(
            model, lambda: model(torch.randn(1, size, dtype=dtype, device=device)).sum(), torch.optim.AdamW
        )

    return build


@pytest.fixture
def weights() -> Callable[[Any], Any]:
    """A program whose peak is the optimizer step: weights of 16 MiB."""
    return layer(2048)


@pytest.fixture
def narrow_weights() -> Callable[[Any], Any]:
    """The same in bf16: weights of 32 MiB."""
    return layer(4096, torch.bfloat16)


@pytest.fixture
def deep_weights() -> Callable[[Any], Any]:
    """Eight blocks in bf16, with weights of 32 MiB in all."""
    build = program(lambda: Net(512, 8), 1, 512, torch.bfloat16)
    return lambda device: build(device)


@pytest.fixture
def language_model() -> Any:
    """A Llama of four layers, with eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_implementation="eager",
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).train()
