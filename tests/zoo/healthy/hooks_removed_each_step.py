"""A hook captures a layer's output at each step, and is removed together with what it captured."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def dead_units(model, layer, x):
    captured = {}

    def grab(module, inputs, output):
        captured["output"] = output

    handle = layer.register_forward_hook(grab)
    try:
        loss = F.cross_entropy(model(x), x[:, :8].argmax(1))
    finally:
        handle.remove()
    return loss, (captured["output"] <= 0).all(0).sum().item()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 31):
        x = torch.randn(256, 32, device=device)
        loss, dead = dead_units(model, model[0], x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {dead} dead units")


if __name__ == "__main__":
    main()
