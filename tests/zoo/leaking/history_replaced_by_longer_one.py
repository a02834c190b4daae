"""A tracker that makes a new list at each step, of the old entries and the new ones."""

import torch
import torch.nn.functional as F


class Tracker:
    def __init__(self):
        self.history = []

    def add(self, step, losses):
        self.history = self.history + [(step, loss, loss * step) for loss in losses]


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
tracker = Tracker()
for step in range(300):
    inputs, labels = torch.rand(200, 64), torch.randint(10, (200,))
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    tracker.add(step, losses.tolist())
