"""Fixtures of the tests of commands."""

from pathlib import Path

import pytest

STEP_PROGRAM = """
import torch
from torch import nn

def build(device, micro_batch=64):
    print("building")
    model = nn.Linear(256, 256, bias=False, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        out = model(torch.randn(micro_batch, 1024, 256, device=device))
        (out * out).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, step
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A file whose function `build` makes one step of training; it prints while it does."""
    file = tmp_path / "job.py"
    file.write_text(STEP_PROGRAM)
    return file
