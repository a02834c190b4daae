"""Momentum contrast: the queue of keys has a fixed length, but its entries keep the key encoder's graph.

The loss uses `queue.detach()`, so no backward ever frees that graph; it gets longer each step although the
queue itself stays as small as it was.
Holds the memory: the attribute `queue` of the model, through a graph that lengthens.
Cure: compute keys under `torch.no_grad()`, or enqueue `keys.detach()`.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class MomentumContrast(nn.Module):
    def __init__(self, size=256):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 16))
        self.key_encoder = copy.deepcopy(self.encoder)
        self.size = size
        self.queue = torch.randn(size, 16, device=device)

    def forward(self, view, other):
        queries = F.normalize(self.encoder(view), dim=1)
        keys = F.normalize(self.key_encoder(other), dim=1)
        positive = (queries * keys.detach()).sum(1, keepdim=True)
        negative = queries @ self.queue.detach().t()
        self.queue = torch.cat([keys, self.queue])[: self.size]
        return torch.cat([positive, negative], dim=1) / 0.2

    @torch.no_grad()
    def update_key_encoder(self, momentum=0.95):
        for key, query in zip(self.key_encoder.parameters(), self.encoder.parameters(), strict=True):
            key.lerp_(query, 1 - momentum)


def main():
    torch.manual_seed(0)
    model = MomentumContrast().to(device)
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.05)
    for step in range(1, 31):
        image = torch.randn(128, 32, device=device)
        view, other = image + 0.1 * torch.randn_like(image), image + 0.1 * torch.randn_like(image)
        logits = model(view, other)
        loss = F.cross_entropy(logits, torch.zeros(128, dtype=torch.long, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update_key_encoder()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
