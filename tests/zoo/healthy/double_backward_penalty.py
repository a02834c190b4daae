"""A gradient penalty with `autograd.grad(create_graph=True)`, and `retain_graph=True` for a second loss.

Both keep a graph within the step; all of it is gone when the step's variables are overwritten.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 128), nn.Softplus()).to(device)
    head = nn.Linear(128, 1).to(device)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
    for step in range(1, 31):
        x = torch.randn(128, 64, device=device, requires_grad=True)
        hidden = body(x)
        score = head(hidden)
        loss = F.mse_loss(score, x.detach().sum(1, keepdim=True))
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        sparsity = 1e-3 * hidden.mean()
        optimizer.zero_grad()
        (loss + 0.1 * penalty).backward(retain_graph=True)
        sparsity.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, penalty {penalty.item():.3f}")


if __name__ == "__main__":
    main()
