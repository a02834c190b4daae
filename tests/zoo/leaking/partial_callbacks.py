"""Callbacks for the epoch's end are made with `functools.partial`, each with the batch that it was made for.

Holds the memory: the local list `epoch_end_callbacks` of `main` -> functools.partial of `describe`.
Cure: bind numbers instead of the batch, or run and clear the callbacks.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def describe(batch, step):
    return f"step {step}: mean {batch.mean().item():.3f}, std {batch.std().item():.3f}"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    epoch_end_callbacks = []
    for step in range(1, 31):
        batch = torch.randn(384, 64, device=device)
        loss = F.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_end_callbacks.append(partial(describe, batch, step=step))
        if step % 10 == 0:
            print(f"loss {loss.item():.4f}; {epoch_end_callbacks[-1]()}")


if __name__ == "__main__":
    main()
