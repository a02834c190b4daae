"""A curvature probe copies the model each step and calls `loss.backward(create_graph=True)` on the copy.

The gradient then has a graph that leads back to the parameter: parameter -> .grad -> grad_fn -> parameter.
The cycle goes through C++, so the copy's parameters and gradients stay although nothing refers to the copy.
Holds the memory: the gradients' own graph (`.grad` with a grad_fn).
Cure: `torch.autograd.grad(..., create_graph=True)`, or set `.grad = None` when done.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def curvature(model, x, y):
    """Hutchinson's estimate of the trace of the Hessian, from one random direction."""
    probe = copy.deepcopy(model)
    F.cross_entropy(probe(x), y).backward(create_graph=True)
    gradients = torch.cat([p.grad.flatten() for p in probe.parameters()])
    direction = torch.randint_like(gradients, 2) * 2 - 1
    products = torch.autograd.grad(gradients @ direction, list(probe.parameters()))
    return (torch.cat([p.flatten() for p in products]) @ direction).item()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Softplus(), nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 31):
        x = torch.randn(64, 64, device=device)
        y = x[:, :10].argmax(1)
        trace = curvature(model, x, y)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, trace of the Hessian {trace:.2f}")


if __name__ == "__main__":
    main()
