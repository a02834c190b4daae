"""`training_step` returns the optimized loss and two more that nobody calls backward on; all are collected.

The differences that `pow` saved for the scalar and the vector loss stay alive with their graphs.
Holds the memory: the local list `outputs` of `fit`, under the keys "scalar" and "vector".
Cure: detach everything except the loss that is optimized.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class FluidModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 3, 3, padding=1))

    def training_step(self, now, later):
        predicted = self.net(now)
        loss = F.smooth_l1_loss(predicted, later)
        scalar = (predicted[:, :1] - later[:, :1]).pow(2).mean()
        vector = (predicted[:, 1:] - later[:, 1:]).pow(2).mean()
        return {"loss": loss, "scalar": scalar, "vector": vector}


def fit(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    outputs = []
    for step in range(1, steps + 1):
        now = torch.randn(16, 3, 32, 32, device=device)
        later = now.roll(1, dims=-1)
        result = model.training_step(now, later)
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        outputs.append({"scalar": result["scalar"], "vector": result["vector"]})
        if step % 10 == 0:
            print(f"step {step}: loss {result['loss'].item():.4f}, scalar {result['scalar'].item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    fit(FluidModel().to(device), steps=30)
