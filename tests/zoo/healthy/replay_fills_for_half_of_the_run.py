"""A replay buffer with a bound that is reached in the middle of the run."""

import random
from collections import deque

import torch
import torch.nn.functional as F

torch.manual_seed(0)
random.seed(0)
policy = torch.nn.Sequential(torch.nn.Linear(400, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
target = torch.nn.Sequential(torch.nn.Linear(400, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.Adam(policy.parameters())
memory = deque(maxlen=300)
state = torch.rand(400)
for step in range(600):
    following = torch.rand(400)
    memory.append((state, random.randrange(4), random.random(), following))
    state = following
    chosen = random.choices(memory, k=16)
    states, following_states = (torch.stack([entry[at] for entry in chosen]) for at in (0, 3))
    actions, rewards = (torch.tensor([entry[at] for entry in chosen]) for at in (1, 2))
    with torch.no_grad():
        wanted = rewards + 0.9 * target(following_states).max(1).values
    loss = F.smooth_l1_loss(policy(states).gather(1, actions[:, None])[:, 0], wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        target.load_state_dict(policy.state_dict())
