"""An attention mask is cached by its `lengths` tensor, which is new for every batch: the cache never hits.

Holds the memory: `functools.lru_cache` of `causal_mask`, without a bound.
Cure: key the cache by plain numbers and give it a `maxsize`; or `causal_mask.cache_clear()`.
"""

from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, WIDTH = 16, 64, 32


@lru_cache(maxsize=None)
def causal_mask(lengths):
    positions = torch.arange(LENGTH, device=lengths.device)
    allowed = positions[:, None] >= positions[None, :]
    return allowed[None] & (positions[None, None, :] < lengths[:, None, None])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, lengths):
        query, key, value = self.project(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        scores = scores.masked_fill(~causal_mask(lengths), -1e9)
        return self.out(scores.softmax(-1) @ value)


def main():
    torch.manual_seed(0)
    model = Attention().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 41):
        x = torch.randn(BATCH, LENGTH, WIDTH, device=device)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH,), device=device)
        loss = F.mse_loss(model(x, lengths), x.cumsum(1) / LENGTH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
