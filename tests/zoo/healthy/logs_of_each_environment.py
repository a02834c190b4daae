"""Many environments, each with a log of its episode that it clears when that ends, each at its own time."""

import random

import torch


class Environment:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.log = []
        self.length = self.rng.randint(20, 60)

    def act(self, value):
        self.log.append((value, self.rng.random(), self.rng.random()))
        if len(self.log) == self.length:
            self.log.clear()
            self.length = self.rng.randint(20, 60)


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
environments = [Environment(seed) for seed in range(300)]
for _ in range(300):
    values = model(torch.rand(300, 16)).squeeze(1)
    optimizer.zero_grad()
    values.square().mean().backward()
    optimizer.step()
    for environment, value in zip(environments, values.tolist(), strict=True):
        environment.act(value)
