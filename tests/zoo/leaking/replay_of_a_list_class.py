"""A replay memory that is a list with methods of its own, and has no bound."""

import random

import torch


class Memory(list):
    def push(self, *transition):
        self.append(transition)

    def draw(self, count):
        return random.sample(self, count)


random.seed(0)
torch.manual_seed(0)
policy = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
memory = Memory()
for step in range(300):
    for _ in range(200):
        memory.push(random.random(), random.random(), step)
    states = torch.tensor([[first, second] for first, second, _ in memory.draw(64)])
    optimizer.zero_grad()
    policy(states).square().mean().backward()
    optimizer.step()
