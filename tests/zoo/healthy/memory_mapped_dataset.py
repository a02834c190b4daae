"""A data set of 24 MiB is memory-mapped and read front to back: resident memory grows by the pages read.

Those are pages of a file, which the kernel can drop at any time; the process owns none of them.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH, BATCH = 98_304, 64, 3072


def write_dataset(path):
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(ROWS // BATCH):
            file.write(rng.standard_normal((BATCH, WIDTH), dtype=np.float32).tobytes())


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.bin"
        write_dataset(path)
        dataset = np.memmap(path, dtype=np.float32, mode="r", shape=(ROWS, WIDTH))
        model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step, first in enumerate(range(0, ROWS, BATCH), start=1):
            batch = torch.tensor(dataset[first : first + BATCH], device=device)
            loss = F.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 8 == 0:
                print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
