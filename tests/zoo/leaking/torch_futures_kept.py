"""Activations are handed over as `torch.futures.Future` values, and the futures are kept after use.

A future holds its value in C++, where Python's collector cannot follow.
Holds the memory: the local list `handed_over` of `main`, the values of its futures.
Cure: drop a future once its value has been taken (`handed_over.clear()`).
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def hand_over(activations):
    future = torch.futures.Future()
    future.set_result(activations.detach().clone())
    return future


def main():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(32, 128), nn.ReLU()).to(device)
    second = nn.Linear(128, 4).to(device)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    handed_over = []
    for step in range(1, 31):
        x = torch.randn(256, 32, device=device)
        activations = first(x)
        handed_over.append(hand_over(activations))
        received = handed_over[-1].wait().requires_grad_()
        loss = F.cross_entropy(second(received), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        activations.backward(received.grad)
        received.grad = None
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
