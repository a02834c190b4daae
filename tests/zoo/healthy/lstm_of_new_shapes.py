"""An LSTM over batches of ever new shapes: oneDNN's cache fills at each step, up to its bound."""

import random

import torch

torch.manual_seed(0)
random.seed(0)
lstm = torch.nn.LSTM(32, 64, batch_first=True, bidirectional=True)
head = torch.nn.Linear(128, 2)
optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()], lr=0.01)
for _ in range(80):
    batch = torch.randn(random.randint(1, 16), random.randint(5, 60), 32)
    outputs, _state = lstm(batch)
    loss = head(outputs[:, -1]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
