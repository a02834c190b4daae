"""Runs the documentation's Python, each block by itself, with the names that the pages do not define.

`python documented_snippets.py FOLDER < blocks.json > results.json`: blocks are `[page, line, text]`, a result
is null or a traceback. It runs in its own process, so that nothing of it stays in the process of the tests.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import accelerate
import torch
from torch import nn

import memtriage
from memtriage.treat.parking.handle import ParkError

VOCABULARY = 64


class MyModel(nn.Module):
    """Tokens to a loss, as small as a model can be."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50257, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids)).square().mean()


def undefined_names() -> dict[str, Any]:
    """The names that the pages use without defining them, new for each block."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def train(batch: object = None, steps: int = 3) -> None:
        for _ in range(steps):
            loss(torch.randn(2, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def build(device: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        its_model = nn.Linear(8, 8, device=device)
        its_optimizer = torch.optim.AdamW(its_model.parameters())

        def step() -> None:
            its_model(torch.randn(2, 8, device=device)).sum().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()

        return its_model, its_optimizer, step

    class MegatronPolicyWorker:
        def offload_before_refit(self) -> None: ...

        def offload_after_refit(self) -> None: ...

    def nothing(*arguments: object, **more: object) -> None: ...

    cache: dict[int, torch.Tensor] = {}
    return {
        "__name__": "__main__",
        "memtriage": memtriage,
        "torch": torch,
        "accelerator": SimpleNamespace(log=nothing),
        "MegatronPolicyWorker": MegatronPolicyWorker,
        "MyModel": MyModel,
        "batch": torch.randn(2, 8),
        "build": build,
        "cache": cache,
        "engine": SimpleNamespace(step=train),
        "evaluate": nothing,
        "generate": nothing,
        "graph": SimpleNamespace(replay=train),
        "keys": iter(range(1 << 20)),
        "loader": [torch.randn(2, 8)] * 2,
        "log_text": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.",
        "lookup": lambda key: cache.setdefault(key % 4, torch.zeros(8)),
        "loss": loss,
        "model": model,
        "optimizer": optimizer,
        "send_weights": nothing,
        "steps": [[torch.randn(2, 8)] * 2],
        "table": torch.zeros(8),
        "train": train,
        "writer": SimpleNamespace(add_scalar=nothing),
    }


REPLACED_NAMES: Final[Mapping[str, Mapping[str, Any]]] = {
    "range(steps)": {"steps": 2},
    "Accelerator()": {"Accelerator": accelerate.Accelerator},
    "loss.item()": {"loss": torch.zeros(()), "step": 1},
}
"""Names with another value, in blocks with these texts."""


def run(text: str, folder: Path) -> None:
    """Run a block; then what it defines: a test of pytest's kind, or a function to predict."""
    names = undefined_names()
    for part, other in REPLACED_NAMES.items():
        if part in text:
            names |= other
    before = dict(names)
    exec(compile(text, "snippet", "exec"), names)
    defined = {name: value for name, value in names.items() if before.get(name) is not value}
    for name, value in defined.items():
        if name == "build" and "return" in text:
            memtriage.predict(value)
        if name.startswith("test_") and value.__code__.co_varnames[: value.__code__.co_argcount] == (
            "tmp_path",
        ):
            value(folder / name)
    with contextlib.suppress(ParkError):
        memtriage.unpark()


def main() -> None:
    folder = Path(sys.argv[1])
    results: list[str | None] = []
    for number, (page, line, text) in enumerate(json.load(sys.stdin)):
        work = folder / str(number)
        work.mkdir()
        for path in folder.iterdir():
            if path.is_file():
                (work / path.name).symlink_to(path)
        os.chdir(work)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                run(text, work)
        except BaseException:  # the other snippets still run
            results.append(f"{page}:{line}\n{traceback.format_exc()}")
        else:
            results.append(None)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
