"""Autocast to bfloat16 around each forward pass: casts of the weights are cached, and dropped at its end."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 16)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 31):
        x = torch.randn(128, 64, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits, x[:, :16].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
