"""Batches arrive in shared memory, as from loader workers, and a slice of each is kept as an index.

A slice is a view: it pins the whole shared segment, and its file descriptor.
Holds the memory: the local list `index` of `main` (shared memory, outside malloc).
Cure: `index.append(batch[:4].clone())`.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def receive_batch():
    return torch.randn(256, 128).share_memory_()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 128)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    index = []
    for step in range(1, 31):
        batch = receive_batch()
        index.append(batch[:4])
        x = batch.to(device)
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, first sample {index[0][0, 0].item():.3f}")


if __name__ == "__main__":
    main()
