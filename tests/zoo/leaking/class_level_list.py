"""A sampler collects the batches it has seen in a list that belongs to the class, not to an epoch.

A new sampler is made each epoch, so it looks as if the list were new too.
Holds the memory: the class attribute `NoveltySampler.seen`.
Cure: make `seen` an instance attribute (set it in `__init__`), or clear it each epoch.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class NoveltySampler:
    seen = []

    def __init__(self, data, epoch):
        self.data = data
        self.generator = torch.Generator().manual_seed(epoch)

    def batches(self, count):
        for _ in range(count):
            index = torch.randint(len(self.data), (256,), generator=self.generator)
            batch = self.data[index.to(self.data.device)]
            self.seen.append(batch)
            yield batch

    def novelty(self, batch):
        return (batch.mean(0) - self.seen[0].mean(0)).norm().item()


def main():
    torch.manual_seed(0)
    data = torch.randn(4096, 64, device=device)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(5):
        sampler = NoveltySampler(data, epoch)
        for batch in sampler.batches(6):
            loss = F.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}, novelty {sampler.novelty(batch):.3f}")


if __name__ == "__main__":
    main()
