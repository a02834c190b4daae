"""A contrastive model lengthens its queue of keys, a registered buffer, and never removes old ones.

There is always just one buffer, which `torch.cat` makes again.
Holds the memory: the buffer `queue` of the model.
Cure: write new keys over the oldest in a buffer of fixed size.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("queue", torch.empty(0, 64))

    def forward(self, x):
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            key = F.normalize(self.key(x), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue[-512:].t()], 1)
        self.queue = torch.cat([self.queue, key])
        return F.cross_entropy(logits / 0.1, torch.zeros(len(x), dtype=torch.long, device=x.device))


def main():
    torch.manual_seed(0)
    model = Contrast().to(device)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=1e-2)
    for step in range(1, 41):
        loss = model(torch.randn(512, 64, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
