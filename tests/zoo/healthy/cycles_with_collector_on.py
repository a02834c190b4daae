"""Each step builds a tree whose nodes know parent and children: garbage cycles, which the collector frees.

Memory rises for some steps and falls when the collector runs: a sawtooth, not a leak.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Node:
    def __init__(self, value, parent=None):
        self.value = value
        self.parent = parent
        self.children = []
        if parent is not None:
            parent.children.append(self)


def split(values, depth, parent=None):
    node = Node(values, parent)
    if depth > 0:
        for half in values.sort().values.chunk(2):
            split(half, depth - 1, node)
    return node


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 41):
        x = torch.randn(256, 32, device=device)
        root = split(x.flatten(), depth=6)
        median = root.children[1].value[0].item()
        loss = F.mse_loss(model(x), (x > median).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, median {median:.4f}")


if __name__ == "__main__":
    main()
