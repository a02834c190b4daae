"""`weakref.finalize(model, ...)` is called each step, with that step's noise as an argument.

A finalizer keeps its arguments until the object dies; the model lives as long as the run.
Holds the memory: the registry of `weakref.finalize`.
Cure: finalize a short-lived object, detach the finalizer (`finalizer.detach()`), or pass no tensors.
"""

import weakref

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def wipe(noise):
    noise.zero_()


def private_step(model, optimizer, x, target):
    noise = [1e-3 * torch.randn_like(p) for p in model.parameters()]
    weakref.finalize(model, wipe, noise[0]).atexit = False
    loss = F.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    for p, addition in zip(model.parameters(), noise, strict=True):
        p.grad += addition
    optimizer.step()
    return loss.item()


def main():
    torch.manual_seed(0)
    model = nn.Linear(256, 96).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 31):
        x = torch.randn(64, 256, device=device)
        loss = private_step(model, optimizer, x, x[:, :96])
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
