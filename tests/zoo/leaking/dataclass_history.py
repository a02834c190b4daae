"""The run's record is made of nested dataclasses; each step's record has the attention weights in it.

Holds the memory: `run.epochs[...].steps[...].attention`.
Cure: store a summary (entropy, maximum) instead of the weights.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(slots=True)
class StepRecord:
    loss: float
    attention: Tensor


@dataclass
class EpochRecord:
    number: int
    steps: list[StepRecord] = field(default_factory=list)


@dataclass
class RunRecord:
    name: str
    epochs: list[EpochRecord] = field(default_factory=list)


class Pooling(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        attention = (self.query(x) @ x.transpose(1, 2)).softmax(-1)
        return self.out(attention @ x), attention


def main():
    torch.manual_seed(0)
    model = Pooling().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = RunRecord("pooling")
    for number in range(6):
        run.epochs.append(EpochRecord(number))
        for _ in range(5):
            x = torch.randn(16, 48, 16, device=device)
            pooled, attention = model(x)
            loss = F.mse_loss(pooled, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.epochs[-1].steps.append(StepRecord(loss.item(), attention))
        print(f"epoch {number}: loss {run.epochs[-1].steps[-1].loss:.4f}")


if __name__ == "__main__":
    main()
