"""Small models to predict, and the measured workloads."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

GROUND_TRUTH = Path(__file__).parent.parent / "data" / "groundtruth"


@pytest.fixture(scope="session")
def measured() -> dict[str, Any]:
    """What one H200 measured, by workload."""
    return {load["name"]: load for load in json.loads((GROUND_TRUTH / "measured_h200.json").read_text())}


@pytest.fixture(scope="session")
def workload() -> Callable[[str], Callable[[Any], Any]]:
    """The build function of a measured workload."""
    spec = importlib.util.spec_from_file_location("workloads", GROUND_TRUTH / "workloads.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    specs = {load["name"]: load for load in json.loads((GROUND_TRUTH / "specs.json").read_text())}
    return lambda name: lambda device: module.build(specs[name], device)


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
