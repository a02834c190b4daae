"""Exercise 1: train a small classifier. Its memory grows at every step; find out why."""

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 60


class Log:
    """Keeps what is worth plotting later."""

    def __init__(self) -> None:
        self.values: dict[str, list[torch.Tensor]] = {}

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)

    def latest(self, name: str) -> float:
        return self.values[name][-1].item()


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(256, 256, device=device)
    return x, x[:, :10].argmax(dim=1)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = Log()
    for step in range(1, STEPS + 1):
        x, target = batch(device)
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        x, target = batch(device)
        log.add(train=loss.detach(), validation=F.cross_entropy(model(x), target))
        if step % 20 == 0:
            print(f"step {step}: loss {log.latest('train'):.4f}, validation {log.latest('validation'):.4f}")


if __name__ == "__main__":
    main()
