"""Every four steps a copy of the averaged weights is appended to a list, "for the best-of selection".

Holds the memory: the local list `ema_snapshots` of `main`.
Cure: keep the best one only, or save the others to disk.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def update_ema(ema, model, decay):
    for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(parameter, 1 - decay)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).to(device)
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ema_snapshots = []
    for step in range(1, 41):
        x = torch.rand(32, 128, device=device)
        loss = F.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_ema(ema, model, decay=0.9)
        if step % 4 == 0:
            ema_snapshots.append({name: value.clone() for name, value in ema.state_dict().items()})
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {len(ema_snapshots)} snapshots")


if __name__ == "__main__":
    main()
