"""Losses are kept as detached scalars, to be averaged on the device without waiting for it every step."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
losses = []


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, 41):
        x = torch.randn(256, 64, device=device)
        loss = F.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 10 == 0:
            print(f"step {step}: loss {torch.stack(losses[-10:]).mean().item():.3f}")


if __name__ == "__main__":
    main()
