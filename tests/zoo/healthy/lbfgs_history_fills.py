"""L-BFGS keeps the last eight pairs of steps and gradients: eight steps of growth, then none."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=1, history_size=8)
    x = torch.rand(256, 64, device=device)
    target = x.sort(1).values

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        return loss

    for step in range(1, 37):
        loss = optimizer.step(closure)
        if step % 12 == 0:
            print(f"step {step}: loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
