"""Losses kept with their graphs until memory is full (M21); `--flat` is no leak: lengths vary."""

from __future__ import annotations

import sys

import torch
from limits import MIB, limit, parser, say

WIDTH = 1024
ROWS = {"cuda": 4096, "cpu": 2048}
LIMIT = {"cuda": 3000 * MIB, "cpu": 1500 * MIB}
FLAT_LIMIT = 4000 * MIB
TRAINED = 8
"""One in so many rows is trained on; the loss for the log is that of all."""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=400)
    made.add_argument("--flat", action="store_true", help="varying lengths, nothing kept")
    options = made.parse_args()
    torch.manual_seed(0)
    limit(options.device, FLAT_LIMIT if options.flat else LIMIT[options.device])
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 1)])
    model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters())
    history = []
    for step in range(options.steps):
        rows = ROWS[options.device] * (1 + step % 8 if options.flat else 1)
        x = torch.randn(rows, WIDTH, device=options.device)
        loss = model(x if options.flat else x[: rows // TRAINED]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not options.flat:
            prediction = model(x).square().mean()  # for the log
            history.append(prediction.detach() if options.cured else prediction)
        print(f"step {step + 1}", file=sys.stderr, flush=True)
    say(completed=True, kept=len(history))


if __name__ == "__main__":
    main()
