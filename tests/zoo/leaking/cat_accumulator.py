"""All predictions are concatenated into one tensor that is 64 KiB longer after each step.

There is always just one tensor, but its size grows without end (and each step copies all of it).
Holds the memory: the local variable `all_predictions` of `main`.
Cure: compute the statistic batch by batch; or reset the tensor at each epoch's end.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    all_predictions = torch.empty(0, 32, device=device)
    for step in range(1, 41):
        x = torch.randn(512, 16, device=device)
        predictions = model(x)
        loss = F.mse_loss(predictions, x.repeat(1, 2).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        all_predictions = torch.cat([all_predictions, predictions.detach()])
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, spread {all_predictions.std().item():.3f}")


if __name__ == "__main__":
    main()
