"""An average of the weights is started at step 10: one copy of the model, once, in the middle of the run."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    average = None
    for step in range(1, 37):
        x = torch.rand(64, 128, device=device)
        loss = F.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 10:
            average = copy.deepcopy(model).requires_grad_(False)
        elif average is not None:
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        if step % 12 == 0:
            of_average = F.mse_loss(average(x), x.flip(1)).item()
            print(f"step {step}: loss {loss.item():.4f}, of the average {of_average:.4f}")


if __name__ == "__main__":
    main()
