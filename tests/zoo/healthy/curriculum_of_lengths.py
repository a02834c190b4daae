"""A curriculum: sequences get longer by 16 each step, up to 384 after twenty steps, and then stay so.

What is alive at a step's end (batch, logits, loss) grows with the length, and stops growing with it.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 41):
        length = min(64 + 16 * step, 384)
        start = torch.randint(64, (8, 1), device=device)
        tokens = (start + torch.arange(length + 1, device=device)) % 64
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: length {length}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
