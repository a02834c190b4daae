"""Recommendations: each user's list gets what he saw, and none of a thousand lists is ever cut."""

import random

import torch

rng = random.Random(0)
torch.manual_seed(0)
users = torch.nn.Embedding(1000, 16)
items = torch.nn.Embedding(500, 16)
optimizer = torch.optim.SparseAdam([*users.parameters(), *items.parameters()], lr=0.01)
users.sparse = items.sparse = True
seen = {user: [] for user in range(1000)}
for step in range(300):
    batch = [(rng.randrange(1000), rng.randrange(500)) for _ in range(200)]
    user, item = torch.tensor(batch).T
    scores = (users(user) * items(item)).sum(dim=1)
    optimizer.zero_grad()
    scores.sigmoid().mean().backward()
    optimizer.step()
    for (who, _), score in zip(batch, scores.tolist(), strict=True):
        seen[who].append((step, score, rng.random()))
