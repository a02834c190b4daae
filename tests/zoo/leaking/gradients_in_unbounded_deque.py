"""The last gradients are kept in a deque for a noise estimate, but the deque has no `maxlen`.

Holds the memory: the local variable `recent` of `main`.
Cure: `deque(maxlen=8)`.
"""

from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def noise_scale(recent):
    stacked = torch.stack(list(recent)[-8:])
    return (stacked.var(0).sum() / stacked.mean(0).square().sum()).item()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weights = torch.randn(128, 1, device=device)
    recent = deque()
    for step in range(1, 33):
        x = torch.randn(64, 128, device=device)
        loss = F.mse_loss(model(x), x @ weights)
        optimizer.zero_grad()
        loss.backward()
        recent.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
        if step % 8 == 0:
            print(f"step {step}: loss {loss.item():.2f}, gradient noise {noise_scale(recent):.3f}")


if __name__ == "__main__":
    main()
