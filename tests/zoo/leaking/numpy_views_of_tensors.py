"""Embeddings are kept "as numpy", but `.numpy()` is a view: each array keeps its whole tensor alive.

Of each array only the first row is ever used.
Holds the memory: the module-level list `embeddings`, through the base of every array.
Cure: copy what is needed (`[0].copy()`), which lets the tensor go.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
embeddings = []


def remember(hidden):
    embeddings.append(hidden.detach().cpu().numpy()[:1])


def main():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(32, 128), nn.Tanh()).to(device)
    decoder = nn.Linear(128, 32).to(device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    for step in range(1, 31):
        x = torch.randn(256, 32, device=device)
        hidden = encoder(x)
        loss = F.mse_loss(decoder(hidden), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        remember(hidden)
        if step % 10 == 0:
            drift = abs(embeddings[-1] - embeddings[0]).mean()
            print(f"step {step}: loss {loss.item():.4f}, drift {drift:.3f}")


if __name__ == "__main__":
    main()
