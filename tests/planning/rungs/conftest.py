"""Models that the changes are made to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def model() -> nn.Module:
    """Four blocks that are alike."""
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])


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
