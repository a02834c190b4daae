"""The predictions of all steps are joined to one numpy array, which is 128 KiB longer after each of them.

There is always just one array, but its size grows without end (and each step copies all of it).
Holds the memory: the attribute `predictions` of the local variable `evaluation` of `main`.
Cure: compute the statistic batch by batch; or keep a list of blocks, and clear it at each epoch's end.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Evaluation:
    def __init__(self, width):
        self.predictions = np.empty((0, width))

    def add(self, predictions):
        block = predictions.detach().double().cpu().numpy()
        self.predictions = np.concatenate([self.predictions, block])


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    evaluation = Evaluation(32)
    for step in range(1, 81):
        x = torch.randn(512, 16, device=device)
        predictions = model(x)
        loss = F.mse_loss(predictions, x.repeat(1, 2).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        evaluation.add(predictions)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}, spread {evaluation.predictions.std():.3f}")


if __name__ == "__main__":
    main()
