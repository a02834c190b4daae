"""A replay buffer of transitions with a bound that the run does not reach."""

import random
from collections import deque

import torch
import torch.nn.functional as F

torch.manual_seed(0)
random.seed(0)
policy = torch.nn.Linear(4096, 4)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
memory = deque(maxlen=5000)
state = torch.rand(4096)
for _ in range(80):
    following = torch.rand(4096)
    memory.append((state, random.randrange(4), random.random(), following))
    state = following
    chosen = random.choices(memory, k=16)
    loss = F.mse_loss(policy(torch.stack([entry[0] for entry in chosen])), torch.zeros(16, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
