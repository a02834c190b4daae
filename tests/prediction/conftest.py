"""Small models to predict, and the measured workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support import groundtruth


@pytest.fixture(scope="session")
def measured() -> dict[str, Any]:
    """What one H200 measured, by workload."""
    return groundtruth.measured("measured")


@pytest.fixture(scope="session")
def workload() -> Callable[[str], Callable[[Any], Any]]:
    """The build function of a measured workload."""
    return groundtruth.workload


@pytest.fixture
def net() -> Callable[..., nn.Module]:
    """A small network on a device."""
    return lambda device: nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64)
    ).to(device)


@pytest.fixture
def training() -> Callable[..., Any]:
    """(model, optimizer, step) of a model, given what makes its loss."""

    def make(model: nn.Module, loss: Callable[[], torch.Tensor], optimizer: Any = None) -> Any:
        optimizer = optimizer or torch.optim.AdamW(model.parameters())

        def step() -> None:
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return make
