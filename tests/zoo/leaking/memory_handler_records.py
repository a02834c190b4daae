"""Debug messages are buffered by a `logging.handlers.MemoryHandler`; their arguments are tensors.

A record is formatted only when the buffer is flushed, so until then it keeps its arguments.
Holds the memory: the handler's `buffer`, LogRecord -> `args`.
Cure: log numbers (`logits.std().item()`); a smaller `capacity`; flush.
"""

import logging
import logging.handlers

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
logger = logging.getLogger("train")


def train_step(model, optimizer, x):
    logits = model(x)
    loss = F.cross_entropy(logits, x.argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    logger.debug("logits: %s", logits.detach())
    return loss.item()


def main():
    torch.manual_seed(0)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(logging.handlers.MemoryHandler(capacity=10_000, flushOnClose=False))
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        loss = train_step(model, optimizer, torch.randn(512, 48, device=device))
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
