"""The last ten gradients are kept in a `deque(maxlen=10)`: ten steps of growth, then none."""

from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weights = torch.randn(128, 1, device=device)
    recent = deque(maxlen=10)
    for step in range(1, 37):
        x = torch.randn(64, 128, device=device)
        loss = F.mse_loss(model(x), x @ weights)
        optimizer.zero_grad()
        loss.backward()
        recent.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
        if step % 12 == 0:
            agreement = F.cosine_similarity(recent[0], recent[-1], dim=0).item()
            print(f"step {step}: loss {loss.item():.2f}, agreement of gradients {agreement:.3f}")


if __name__ == "__main__":
    main()
