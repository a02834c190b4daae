"""A frozen copy of the student joins the league at every step, and none leaves it.

Holds the memory: the list `players` of the league, which is a local variable of `main`.
Cure: `collections.deque(maxlen=...)`, or keep the old players on disk.
"""

import copy
import random

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class League:
    def __init__(self, student):
        self.student = student
        self.players = []

    def snapshot(self):
        self.players.append(copy.deepcopy(self.student).requires_grad_(False))

    def opponent(self):
        return random.choice(self.players)


def main():
    random.seed(0)
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(128, 192), nn.ReLU(), nn.Linear(192, 16)).to(device)
    league = League(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)
    for step in range(1, 41):
        league.snapshot()
        x = torch.randn(256, 128, device=device)
        with torch.no_grad():
            target = league.opponent()(x).softmax(1)
        loss = F.cross_entropy(student(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {len(league.players)} players")


if __name__ == "__main__":
    main()
