"""`reset()` gives the metric a new list instead of clearing the old one, and a logger still has the old ones.

Holds the memory: the logger's `curves`, one list of predictions for each epoch.
Cure: `self.predictions.clear()` in `reset`; and let the logger keep what it draws, not the list itself.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class PredictionStore:
    def __init__(self):
        self.predictions = []

    def update(self, predictions):
        self.predictions.append(predictions.detach())

    def reset(self):
        self.predictions = []


class CurveLogger:
    def __init__(self):
        self.curves = []

    def epoch_end(self, epoch, predictions):
        self.curves.append(predictions)
        spread = torch.cat(predictions).std().item()
        print(f"epoch {epoch}: {len(predictions)} batches, spread {spread:.3f}")


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    store, logger = PredictionStore(), CurveLogger()
    for epoch in range(18):
        for _ in range(4):
            x = torch.randn(1024, 32, device=device)
            predictions = model(x)
            loss = F.mse_loss(predictions, x.cos())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            store.update(predictions)
        logger.epoch_end(epoch, store.predictions)
        store.reset()


if __name__ == "__main__":
    main()
