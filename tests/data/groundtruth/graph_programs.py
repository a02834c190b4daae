"""Small programs under `torch.compile(mode="reduce-overhead")`, each with another use of CUDA graphs.

`graph_programs_h100.json` has what an H100 said of their steps, with torch 2.11.0. `build(spec, device)`
returns `(model, optimizer, step)`; a spec is `{"name": ...}`.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SPECS = [
    {"name": name} for name in ("lengths", "late", "branches", "marked", "evaluated", "whole", "normalized")
]
MODE = "reduce-overhead"
ROWS, WIDTH = 2048, 1024


def build(spec: dict[str, Any], device: Any) -> Any:
    return globals()[spec["name"]](device)


class Layers(nn.Module):
    def __init__(self, device: Any) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, device=device)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, device=device)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.narrow(F.gelu(self.wide(values))))


def values(device: Any, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device=device)


def loss_of(result: torch.Tensor) -> torch.Tensor:
    return result.float().pow(2).mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def lengths(device: Any) -> Any:
    """Batches of three lengths in turn: a graph for each."""
    model = Layers(device)
    model.compile(mode=MODE)
    optimizer = adam(model)
    model.first = values(device)
    rows = itertools.cycle((ROWS, ROWS // 2, ROWS // 4))

    def step() -> None:
        batch = values(device, next(rows))  # lives until the end of the step
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def late(device: Any) -> Any:
    """Gradients that live until the next step begins."""
    model = Layers(device)
    model.compile(mode=MODE, dynamic=False)
    optimizer = adam(model)
    model.first = values(device)

    def step() -> None:
        optimizer.zero_grad()
        batch = values(device)  # lives until the end of the step
        loss_of(model(batch)).backward()
        optimizer.step()

    return model, optimizer, step


def branches(device: Any) -> Any:
    """A second part that is recorded after a graph was replayed."""
    model = nn.Module()
    model.parts = nn.ModuleList(Layers(device) for _ in range(3))
    for part in model.parts:
        part.compile(mode=MODE, dynamic=False)
    optimizer = adam(model)
    chosen = iter((1, 1, 1, 2, 1, 2, 2))

    def step() -> None:
        first, second = model.parts[0], model.parts[next(chosen)]
        loss_of(second(first(values(device)))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def marked(device: Any) -> Any:
    """Two batches for one step of the optimizer, which only a mark at its beginning makes possible."""
    model = Layers(device)
    model.compile(mode=MODE, dynamic=False)
    optimizer = adam(model)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        for _ in range(2):
            loss_of(model(values(device))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def evaluated(device: Any) -> Any:
    """Batches without gradients after each step."""
    model = Layers(device)
    model.compile(mode=MODE, dynamic=False)
    optimizer = adam(model)

    def step() -> None:
        loss_of(model(values(device))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(2):
                model(values(device, 2 * ROWS)).sum()

    return model, optimizer, step


def whole(device: Any) -> Any:
    """A compiled step: model, backward and optimizer."""
    model = Layers(device)
    optimizer = adam(model)

    def train(batch: torch.Tensor) -> None:
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(train, mode=MODE)
    return model, optimizer, lambda: compiled(values(device))


def normalized(device: Any) -> Any:
    """Buffers that are written, numbers that are drawn, a loss that is kept."""
    model = nn.Module()
    model.layers = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH, device=device),
        nn.BatchNorm1d(4 * WIDTH, device=device),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(4 * WIDTH, WIDTH, device=device),
    )
    compiled = torch.compile(lambda batch: model.layers(batch), mode=MODE, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        loss = loss_of(compiled(values(device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.kept = loss

    return model, optimizer, step
