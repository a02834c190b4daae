"""M1: what training keeps for each parameter, read off memtriage's ledger: `anatomy.py [--cured|--predict]`.

16-bit weights, an fp32 master copy with Adam's two states, fp32 gradients; with `--cured` everything in bf16.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from limits import parser, say

import memtriage

sys.path.insert(0, str(Path(__file__).parent.parent))
from programs import Size, program

SIZES = {
    "cuda": Size(hidden=1024, head=64, layers=12, vocabulary=8192, batch=2, length=256),
    "cpu": Size(hidden=512, head=64, layers=8, vocabulary=4096, batch=1, length=32),
}


class MasterAdamW(torch.optim.AdamW):
    """AdamW on fp32 copies of 16-bit weights, whose gradients become fp32 as soon as they are made."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.weights = parameters
        self.master = [parameter.detach().float().requires_grad_() for parameter in parameters]
        super().__init__(self.master, foreach=False)
        for weight, master in zip(self.weights, self.master, strict=True):
            weight.register_post_accumulate_grad_hook(lambda weight, master=master: _widen(weight, master))

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.master, strict=True):
                weight.copy_(master)


def _widen(weight: torch.Tensor, master: torch.Tensor) -> None:
    assert weight.grad is not None
    master.grad = weight.grad.float()
    weight.grad = None


def build(device: Any, *, size: Size, cured: bool) -> Any:
    """Model, optimizer and a step that keeps its gradients until the next."""
    model, optimizer, _ = program(size)(device)
    if not cured:
        optimizer = MasterAdamW(list(model.parameters()))

    def step() -> None:
        optimizer.zero_grad()
        ids = torch.randint(0, size.vocabulary, (size.batch, size.length), device=device)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return model, optimizer, step


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--predict", action="store_true", help="say what memtriage predicts, and end")
    options = made.parse_args()
    size = SIZES[options.device]
    if options.predict:
        prediction = memtriage.predict(lambda device: build(device, size=size, cured=options.cured))
        workspace = prediction.by_owner.get("workspace", 0)  # the libraries' own, whatever the model
        say(
            end=prediction.steps[-1].end_allocated - workspace,
            peak=prediction.peak_allocated,
            workspace=workspace,
        )
        return
    torch.manual_seed(0)
    model, optimizer, step = build(options.device, size=size, cured=options.cured)
    count = sum(parameter.numel() for parameter in model.parameters())
    for _ in range(2):
        step()
    which = "cuda:0" if options.device == "cuda" else "host"
    ledger = next(ledger for ledger in memtriage.ledger() if ledger.device == which)
    owners: Counter[str] = Counter()
    for row in ledger.rows:
        owners[str(row.owner)] += row.bytes if row.owner else 0
    del optimizer
    say(
        parameters=count, owners=owners, total=ledger.total,
        allocated=torch.cuda.memory_allocated() if options.device == "cuda" else None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
