"""A build function whose model is one weight, for programs of which only the step matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def build_with(function: Callable[[torch.Tensor], torch.Tensor], count: int = 4) -> Callable[[Any], Any]:
    """Return a build function whose step sums what a function makes of `count` float32 numbers."""

    def build(device: Any) -> Any:
        weight = torch.nn.Parameter(torch.randn(count, device=device))
        optimizer = torch.optim.SGD([weight])

        def step() -> None:
            function(weight).sum().backward()
            optimizer.zero_grad()

        return torch.nn.ParameterList([weight]), optimizer, step

    return build
