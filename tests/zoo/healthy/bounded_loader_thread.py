"""A loader thread reads ahead into a queue of four: it fills at once and then waits for the consumer."""

import queue
import threading

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def load(batches, count):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        batches.put(torch.randn(256, 64, generator=generator).to(device))
    batches.put(None)


def main():
    torch.manual_seed(0)
    batches = queue.Queue(maxsize=4)
    loader = threading.Thread(target=load, args=(batches, 32), name="loader", daemon=True)
    loader.start()
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    while (batch := batches.get()) is not None:
        loss = F.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 8 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    loader.join()


if __name__ == "__main__":
    main()
