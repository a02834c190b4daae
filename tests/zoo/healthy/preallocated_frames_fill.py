"""Frames go into one array that is allocated at the start: its pages are first written as it fills."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
FRAMES, SIZE = 160, 512 * 1024


def main():
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    seen = np.zeros((FRAMES, SIZE), np.uint8)
    model = nn.Sequential(nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 512)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(FRAMES):
        seen[step] = random.integers(0, 255, SIZE, np.uint8)
        rows = seen[random.integers(0, step + 1), : 64 * 512].reshape(64, 512)
        batch = torch.from_numpy(rows).to(device).float().div(255)
        loss = F.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"frames {seen.shape[0]}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
