"""A running total of the probe loss is a tensor with a graph, so every addition links one more forward pass.

Holds the memory: the local variable `probe_total` of `main`, through its chain of AddBackward0 nodes.
Cure: `probe_total += probe_loss.item()`, or evaluate the probe under `torch.no_grad()`.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    direction = torch.randn(64, 10, device=device)
    probe = torch.randn(256, 64, device=device)
    probe_target = (probe @ direction).argmax(1)

    probe_total = 0.0
    for step in range(1, 31):
        inputs = torch.randn(128, 64, device=device)
        target = (inputs @ direction).argmax(1)
        loss = F.cross_entropy(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        probe_loss = F.cross_entropy(model(probe), probe_target)
        probe_total += probe_loss
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, mean probe loss {float(probe_total) / step:.3f}")


if __name__ == "__main__":
    main()
