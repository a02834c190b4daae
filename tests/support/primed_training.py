"""Training whose memory fragments, small enough to be searched in seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memtriage.allocator.priming_search import POLICY
from memtriage.model.priming import Priming
from memtriage.planning.priming import plan_priming
from memtriage.prediction.gpu_kinds import GPU_KINDS

QUICK = replace(POLICY, requests=300_000, patience=100_000, grid=40)
"""A search of a second."""


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(F.gelu(self.up(self.norm(inputs))))


def build(device: Any, losses: list[float] | None = None) -> Any:
    """A language model without attention; `losses` gets the loss of each step."""
    model = nn.Sequential(
        nn.Embedding(16000, 512), *[Block(512) for _ in range(4)], nn.Linear(512, 16000)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        ids = torch.randint(0, 16000, (8, 512), device=device)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(ids).view(-1, 16000).float(), ids.view(-1))
        loss.backward()
        if losses is not None:
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def priming_of(gpu_name: str = "") -> Priming:
    """What `memtriage.prime(build)` would choose, after a short search."""
    gpu = next((key for key, kind in GPU_KINDS.items() if kind.name == gpu_name), "h200")
    return plan_priming(build, gpu=gpu, policy=QUICK)
