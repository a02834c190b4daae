"""Rotary tables are cached in a module-level dict, keyed by the offset, which never repeats while streaming.

Holds the memory: the module-level dict `_ROTARY_CACHE`.
Cure: cache one table and slice it, or bound the cache and drop old offsets.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
WINDOW, WIDTH = 512, 64
_ROTARY_CACHE = {}


def rotary_tables(offset):
    if offset not in _ROTARY_CACHE:
        positions = torch.arange(offset, offset + WINDOW, device=device).float()
        frequencies = 10000 ** (-torch.arange(0, WIDTH // 2, device=device) / (WIDTH // 2))
        _ROTARY_CACHE[offset] = torch.stack([torch.cos(positions[:, None] * frequencies),
                                             torch.sin(positions[:, None] * frequencies)])  # fmt: skip
    return _ROTARY_CACHE[offset]


def rotate(x, offset):
    cos, sin = rotary_tables(offset)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class StreamModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, window, offset):
        return self.outer(torch.tanh(rotate(self.inner(window), offset)))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = StreamModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 31):
        window = torch.randn(4, WINDOW, WIDTH, device=device)
        loss = F.mse_loss(model(window, offset=step * WINDOW), window.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
