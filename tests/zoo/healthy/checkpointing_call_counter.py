"""Non-reentrant activation checkpointing; the blocks count their calls: forward once, recomputed once.

The count is printed at the end; it is the same whether or not somebody looks at the graph meanwhile.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = None
    for step in range(1, 31):
        x = torch.randn(256, 64, device=device)
        loss = F.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"calls: {sum(block.calls for block in model.blocks)}")


if __name__ == "__main__":
    main()
