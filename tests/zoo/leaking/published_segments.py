"""Each step publishes its frames in a segment of shared memory of their own; none is closed before the end.

No census lists such a segment: it is neither a tensor's nor malloc's.
Holds the memory: segments of shared memory.
Cure: close and unlink the segment before the last one.
"""

from multiprocessing import shared_memory

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class ProbeChannel:
    def __init__(self):
        self.segments = []

    def publish(self, frames):
        frames = frames.detach().cpu().numpy()
        segment = shared_memory.SharedMemory(create=True, size=frames.nbytes)
        np.ndarray(frames.shape, frames.dtype, buffer=segment.buf)[:] = frames
        self.segments.append(segment)
        self.retire(keep=1_000_000)

    def retire(self, keep=0):
        while len(self.segments) > keep:
            segment = self.segments.pop(0)
            segment.close()
            segment.unlink()


def main():
    torch.manual_seed(0)
    channel = ProbeChannel()
    model = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 256)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(1, 161):
        batch = torch.rand(192, 256, device=device)
        frames = model(batch)
        loss = F.mse_loss(frames, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        channel.publish(frames)
        if step % 40 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    channel.retire()


if __name__ == "__main__":
    main()
