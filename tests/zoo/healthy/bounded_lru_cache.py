"""Masks are cached by length with `lru_cache(maxsize=8)`: the cache fills at first and then replaces."""

import random
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 32


@lru_cache(maxsize=8)
def causal_bias(length):
    allowed = torch.ones(length, length, device=device).tril()
    return (1 - allowed) * -1e9


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.project(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5 + causal_bias(x.shape[1])
        return self.out(scores.softmax(-1) @ value)


def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    model = Attention().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 41):
        length = rng.choice(range(100, 180, 5))
        x = torch.randn(4, length, WIDTH, device=device)
        loss = F.mse_loss(model(x), x.cumsum(1) / length)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {causal_bias.cache_info()}")


if __name__ == "__main__":
    main()
