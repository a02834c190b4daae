"""From a traced program to what a search for blocks looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memtriage.planning.priming import other_settings
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.requests import requests_of
from memtriage.prediction.trace import Trace, trace

KIND = machine("h200")


def traced(layer: Callable[[], nn.Module], *shape: int, conf: str = "") -> Trace:
    def build(device: Any) -> Any:
        model = layer().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.randn(*shape, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return trace(build, KIND, (2, 11), 2, allocator_conf=conf)


def linear() -> nn.Module:
    return nn.Linear(1024, 1024)


@pytest.mark.parametrize(
    ("layer", "shape", "convolves"),
    [(linear, (512, 1024), False), (lambda: nn.Conv2d(16, 16, 3), (8, 16, 128, 128), True)],
)
def test_convolutions_are_known(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], convolves: bool
) -> None:
    requests = requests_of(traced(layer, *shape), KIND.memory)
    assert len(requests.steps) == 2 and any(size for _, size in requests.all())
    assert requests.convolves == convolves


def test_settings_of_the_program_are_not_tried_otherwise() -> None:
    found = traced(linear, 512, 1024, conf="max_split_size_mb:1024")
    tried = other_settings(found, KIND, requests_of(found, KIND.memory), allowed=KIND.memory)
    assert list(tried) == ["large_segment_size_mb:512"]
    settings = tried["large_segment_size_mb:512"]
    assert (settings.large_segment_size, settings.max_split_size) == (512 << 20, 1024 << 20)
