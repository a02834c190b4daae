"""An AverageMeter is updated with a soft dice score that still has its graph.

The softmax output and the one-hot target that `mul` saved live as long as the meter's sum.
Holds the memory: `dice_meter.sum`, through its chain of additions.
Cure: `dice_meter.update(dice.item(), n)`, or detach inside `update`.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.sum, self.count = 0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def average(self):
        return self.sum / self.count


def soft_dice(logits, one_hot):
    probabilities = logits.softmax(dim=1)
    overlap = (probabilities * one_hot).sum()
    return 2 * overlap / (probabilities.sum() + one_hot.sum())


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    centres = torch.randn(16, 32, device=device)
    dice_meter = AverageMeter("dice")
    for step in range(1, 31):
        points = torch.randn(1024, 16, device=device)
        labels = (points @ centres).argmax(1)
        logits = model(points)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dice_meter.update(soft_dice(logits, F.one_hot(labels, 32).float()), n=len(points))
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, dice {float(dice_meter.average):.3f}")


if __name__ == "__main__":
    main()
