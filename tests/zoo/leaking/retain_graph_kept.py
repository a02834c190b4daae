"""`backward(retain_graph=True)` was added to silence an error, and the losses are kept for a moving average.

So nothing frees what the graph saved, and every loss keeps the whole graph of its step.
Holds the memory: the attribute `window` of `MovingAverage`, tensors with a full graph.
Cure: no `retain_graph`; and keep `loss.item()`.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class MovingAverage:
    def __init__(self, size):
        self.size = size
        self.window = []

    def add(self, value):
        self.window.append(value)
        return sum(self.window[-self.size :]) / min(self.size, len(self.window))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 8)).to(
        device
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = MovingAverage(size=5)
    x = torch.randn(256, 64, device=device)
    labels = x[:, :8].argmax(1)
    for step in range(1, 31):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        smooth = average.add(loss)
        if step % 10 == 0:
            print(f"step {step}: loss {smooth.item():.3f}")


if __name__ == "__main__":
    main()
