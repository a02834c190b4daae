"""Trains the small language model."""

import torch
from torch import nn

from model import Model

BATCH, LENGTH = 2, 256


def build(device):
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []

    def step():
        tokens = torch.randint(0, 4096, (BATCH, LENGTH + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    return model, optimizer, step
