"""A loader thread remembers every batch it has served, in a local list, to be able to serve it again.

Holds the memory: thread "loader", local variable `served` of `serve`.
Cure: keep the index of a batch (or its seed), not the batch; or bound the list.
"""

import queue
import threading

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def serve(requests, replies):
    generator = torch.Generator().manual_seed(0)
    served = []
    while (wanted := requests.get()) is not None:
        if wanted == len(served):
            served.append(torch.rand(256, 96, generator=generator).to(device))
        replies.put(served[wanted])


def main():
    torch.manual_seed(0)
    requests, replies = queue.Queue(), queue.Queue(maxsize=1)
    loader = threading.Thread(target=serve, args=(requests, replies), name="loader", daemon=True)
    loader.start()
    model = nn.Sequential(nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 96)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(30):
        requests.put(step)
        batch = replies.get()
        loss = F.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    requests.put(None)
    loader.join()


if __name__ == "__main__":
    main()
