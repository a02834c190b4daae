"""A reader carries its state from chunk to chunk; the loss uses a detached copy, the state itself does not.

So the graph of the state grows by one chunk each step and no backward pass ever walks it.
Holds the memory: the local variable `state` of `main`, through a graph that lengthens.
Cure: `state = state.detach()` after every chunk.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class ChunkReader(nn.Module):
    def __init__(self, features=32, width=256, classes=8):
        super().__init__()
        self.encode = nn.Linear(features, width)
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, chunk, state):
        encoded = self.encode(chunk).relu()
        logits = self.head(encoded + state.detach())
        state = torch.tanh(self.mix(torch.cat([encoded, state], dim=1)))
        return logits, state


def main():
    torch.manual_seed(0)
    reader = ChunkReader().to(device)
    optimizer = torch.optim.Adam(reader.parameters(), lr=1e-3)
    state = torch.zeros(64, 256, device=device)
    for step in range(1, 31):
        chunk = torch.randn(64, 32, device=device)
        labels = chunk[:, :8].argmax(1)
        logits, state = reader(chunk, state)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, |state| {state.norm().item():.2f}")


if __name__ == "__main__":
    main()
