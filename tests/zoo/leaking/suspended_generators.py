"""Each step opens a generator over the windows of a recording, reads one window and leaves it suspended.

A suspended generator keeps its local variables, here the whole spectrum of the recording.
Holds the memory: the local list `open_streams` of `main` -> generator `windows`, variable `spectrum`.
Cure: close the generator (`stream.close()`, `contextlib.closing`) and do not keep it.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def windows(recording, size):
    spectrum = torch.cos(recording.unsqueeze(0) * torch.arange(1, 9, device=recording.device).unsqueeze(1))
    for first in range(0, spectrum.shape[1], size):
        yield spectrum[:, first : first + size]


def main():
    torch.manual_seed(0)
    recordings = torch.randn(30, 4096, device=device)
    model = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 256)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    open_streams = []
    for step, recording in enumerate(recordings, start=1):
        stream = windows(recording, size=256)
        open_streams.append(stream)
        window = next(stream).clone()
        loss = F.mse_loss(model(window), window)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
