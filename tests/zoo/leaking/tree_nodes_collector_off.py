"""A tree search builds nodes that know their parent and their children; the collector is switched off.

Holds the memory: garbage cycles of `Node`, one tree a step, each node with its embedding.
Cure: `gc.collect()` between searches (or `gc.enable()`), or a `weakref` to the parent.
"""

import gc

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Node:
    def __init__(self, embedding, parent=None):
        self.embedding = embedding
        self.parent = parent
        self.children = []
        if parent is not None:
            parent.children.append(self)


def search(model, root_state, width=3):
    with torch.no_grad():
        root = Node(model.dynamics(root_state))
        for _ in range(width):
            child = Node(model.dynamics(root.embedding), parent=root)
            best = model.value(child.embedding).mean()
    return best.item()


class Planner(nn.Module):
    def __init__(self):
        super().__init__()
        self.dynamics = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.value = nn.Linear(64, 1)

    def forward(self, state):
        return self.value(self.dynamics(state))


def main():
    gc.disable()
    torch.manual_seed(0)
    planner = Planner().to(device)
    optimizer = torch.optim.Adam(planner.parameters(), lr=1e-3)
    for step in range(1, 33):
        state = torch.randn(128, 64, device=device)
        best = search(planner, state)
        loss = F.mse_loss(planner(state), state.mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 0:
            print(f"step {step}: loss {loss.item():.4f}, best value {best:.3f}")


if __name__ == "__main__":
    main()
