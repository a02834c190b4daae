"""A ranking metric keeps all predictions and targets in list states; `compute` does not empty them.

Holds the memory: the metric's state `preds` (and, much smaller, `target`).
Cure: `auroc.reset()` at each epoch's end, or binned states (`thresholds=100`).
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Metric:
    """What metric libraries do: named states with defaults, to which `reset` goes back."""

    def __init__(self):
        self._defaults = {}

    def add_state(self, name):
        self._defaults[name] = []
        setattr(self, name, [])

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, list(default))


class MultilabelAUROC(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("preds")
        self.add_state("target")

    def update(self, preds, target):
        self.preds.append(preds.detach())
        self.target.append(target.to(torch.uint8))

    def compute(self):
        preds, target = torch.cat(self.preds).mean(1), torch.cat(self.target)
        ranks = preds.argsort().argsort().double() + 1
        positives, negatives = target.sum().item(), (1 - target).sum().item()
        wins = ranks[target == 1].sum().item() - positives * (positives + 1) / 2
        return wins / (positives * negatives)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    auroc = MultilabelAUROC()
    for step in range(1, 31):
        x = torch.randn(2048, 16, device=device)
        target = (x.sum(1) > 0).long()
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits.mean(1), target.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auroc.update(logits.sigmoid(), target)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, AUROC {auroc.compute():.3f}")


if __name__ == "__main__":
    main()
