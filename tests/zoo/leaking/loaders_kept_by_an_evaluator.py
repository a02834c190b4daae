"""A classifier of waves. Each evaluation makes a loader whose workers stay, and keeps it by its step."""

import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS, EVERY, LENGTH = 500, 20, 128


class Waves(Dataset):
    """Waves with noise out of a table, which each worker makes when it first needs it."""

    def __init__(self, count, seed):
        self.count, self.seed, self.noise = count, seed, None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.noise is None:
            self.noise = np.random.default_rng(self.seed).standard_normal((3 * 2**13, LENGTH))
        label = index % 8
        wave = np.sin(np.arange(LENGTH) * (label + 1) / 8)
        return torch.tensor(wave + self.noise[index], dtype=torch.float32), label


class Evaluator:
    def __init__(self):
        self.loaders = {}

    @torch.no_grad()
    def __call__(self, model, step):
        self.loaders[step] = DataLoader(
            Waves(512, step), batch_size=64, num_workers=1, persistent_workers=True
        )
        right = sum((model(x).argmax(1) == label).sum().item() for x, label in self.loaders[step])
        return right / 512


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(LENGTH, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    evaluate = Evaluator()
    train = Waves(4096, 0)
    for step in range(1, STEPS + 1):
        waves, labels = zip(*(train[i] for i in torch.randint(0, 4096, (32,)).tolist()), strict=True)
        loss = nn.functional.cross_entropy(model(torch.stack(waves)), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            print(f"step {step} loss {loss.item():.3f} accuracy {evaluate(model, step):.3f}", flush=True)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
