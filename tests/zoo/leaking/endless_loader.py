"""`itertools.cycle` makes a loader endless, and keeps every batch of the first round to give it again.

Holds the memory: the iterator `batches` of `main`, until the first round is complete and all of it is kept.
Cure: a generator that begins the loader again (`while True: yield from loader`).
"""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.randn(512)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 512)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = itertools.cycle(torch.utils.data.DataLoader(Noise(), batch_size=64))
    for step in range(1, 41):
        x = next(batches)
        loss = F.mse_loss(model(x.to(device)), x.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
