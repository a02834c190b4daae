"""The model that the changes are made to."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.fixture
def model() -> nn.Module:
    """Four blocks that are alike."""
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
