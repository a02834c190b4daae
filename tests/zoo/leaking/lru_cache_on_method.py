"""`lru_cache` on a method has `self` as part of its key, so every model that was ever asked stays alive.

Each step tries a mutated copy of the model and prints its size through a cached method.
Holds the memory: `functools.lru_cache` of `Candidate.parameter_count`.
Cure: cache the number on the instance (`functools.cached_property`), or `cache_clear()`.
"""

import copy
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Candidate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x):
        return self.layers(x)

    @lru_cache
    def parameter_count(self):
        return sum(p.numel() for p in self.parameters())

    def mutated(self, scale):
        child = copy.deepcopy(self)
        with torch.no_grad():
            for p in child.parameters():
                p.grad = None
                p.add_(scale * torch.randn_like(p))
        return child


def main():
    torch.manual_seed(0)
    model = Candidate().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, 31):
        x = torch.rand(64, 64, device=device)
        loss = F.mse_loss(model(x), x.sort(1).values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        rival = model.mutated(0.01)
        with torch.no_grad():
            rival_loss = F.mse_loss(rival(x), x.sort(1).values)
        size = rival.parameter_count()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, rival of {size} parameters {rival_loss.item():.4f}")


if __name__ == "__main__":
    main()
