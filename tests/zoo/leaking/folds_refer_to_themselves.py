"""Each fold's schedule is a lambda that refers to the fold, and the collector is switched off for speed.

The fold, its model with gradients, and its optimizer's state wait for a collection that never comes.
Holds the memory: garbage cycles of `Fold`, one for three steps.
Cure: `gc.collect()` after each fold (or `gc.enable()`); a schedule that does not refer to the fold.
"""

import gc

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Fold:
    def __init__(self):
        self.decay = 0.9
        self.model = nn.Linear(160, 160).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: self.decay**step)

    def run(self):
        for _ in range(3):
            x = torch.randn(64, 160, device=device)
            loss = (self.model(x) - x).pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
        return loss.item()


def main():
    gc.disable()
    torch.manual_seed(0)
    for fold in range(1, 21):
        score = Fold().run()
        if fold % 5 == 0:
            print(f"fold {fold}: loss {score:.4f}")


if __name__ == "__main__":
    main()
