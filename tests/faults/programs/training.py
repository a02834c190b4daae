"""A step of training that may leak, so that a watch takes censuses and records sites."""

import torch

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step(kept=None):
    loss = model(torch.randn(32, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if kept is not None:
        kept.append(model(torch.randn(256, 64)))
    return loss.item()
