"""Every sixth step model and optimizer are serialized into a BytesIO, hashed, and dropped."""

import hashlib
import io

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def fingerprint(model, optimizer):
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return hashlib.sha256(buffer.getbuffer()).hexdigest()[:12], buffer.tell()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, 37):
        x = torch.rand(64, 128, device=device)
        loss = F.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            digest, size = fingerprint(model, optimizer)
            print(f"step {step}: loss {loss.item():.4f}, checkpoint {digest}, {size} bytes")


if __name__ == "__main__":
    main()
