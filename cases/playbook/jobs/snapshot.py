"""M19: a model is deleted and its memory stays; the allocator's history names the line: `snapshot.py OUT`."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from limits import parser, say
from torch import nn

STEPS = 10
WIDTH = 2048


class Cached(nn.Module):
    """Keeps what it computed once, as rotary tables and masks are kept."""

    tables: dict[int, torch.Tensor] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.randn(4 * len(x), WIDTH, device=x.device)
        return self.layers(x + self.tables[len(x)][: len(x)])


def main() -> None:
    made = parser(__doc__)
    made.add_argument("file", type=Path)
    options = made.parse_args()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    model = Cached().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        model(torch.randn(1024 * (1 + step % 4), WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    if options.cured:
        Cached.tables.clear()
    gc.collect()
    torch.cuda.memory._dump_snapshot(str(options.file))
    torch.cuda.memory._record_memory_history(enabled=None)
    print(sys.version, file=sys.stderr)
    say(allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved())


if __name__ == "__main__":
    main()
