"""Results of every step as arrays in dicts of dicts: a new inner dict for every ten steps."""

import numpy as np
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
results = {"train": {}, "val": {}}
for step in range(80):
    inputs, labels = torch.rand(32, 64), torch.randint(10, (32,))
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    block = results["train"].setdefault(step // 10, {})
    block[step] = {"attributions": np.random.randn(128, 128), "loss": loss.item()}
