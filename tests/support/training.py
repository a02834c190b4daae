"""What the build functions of the tests return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def training(
    model: torch.nn.Module, loss: Callable[[], torch.Tensor], optimizer: Any = torch.optim.SGD
) -> Any:
    """(model, optimizer, step): a step makes the loss, goes backward, and frees the gradients it has used."""
    made = optimizer if hasattr(optimizer, "param_groups") else optimizer(model.parameters())

    def step() -> None:
        loss().backward()
        made.step()
        made.zero_grad()

    return model, made, step


def build_with(function: Callable[[torch.Tensor], torch.Tensor], count: int = 4) -> Callable[[Any], Any]:
    """Return a build function whose step sums what a function makes of `count` float32 numbers."""

    def build(device: Any) -> Any:
        model = torch.nn.ParameterList([torch.randn(count, device=device)])
        return training(model, lambda: function(model[0]).sum())

    return build
