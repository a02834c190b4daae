"""Each step builds an augmentation that stores its own bound method; the collector is switched off for speed.

`self.apply = self.with_noise` makes the object refer to itself, so only the collector could free its table.
Holds the memory: garbage cycles of `Augmentation`, one a step.
Cure: `gc.collect()` now and then (or `gc.enable()`); look the method up at call time, or use `WeakMethod`.
"""

import gc

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Augmentation:
    def __init__(self, strength):
        self.table = strength * torch.randn(256, 128, device=device)
        self.apply = self.with_noise if strength > 0 else self.unchanged

    def with_noise(self, batch):
        return batch + self.table

    def unchanged(self, batch):
        return batch


def main():
    gc.disable()  # no pauses in the middle of a step
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, 31):
        augmentation = Augmentation(strength=0.1)
        clean = torch.rand(256, 128, device=device)
        loss = F.mse_loss(model(augmentation.apply(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
