"""A native decoder hands out buffers by pointer; they are copied into tensors but never freed.

No Python object and no tensor has this memory: it can be seen to grow, but nothing can be said to hold it.
Holds the memory: the C heap (host memory).
Cure: free the buffer after the copy (`libc.free`).
"""

import ctypes

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]


def decode_batch(step, rows, width):
    """Stands for a call into a codec: returns a batch that was decoded into a new native buffer."""
    size = rows * width * 4
    pointer = libc.malloc(size)
    ctypes.memset(pointer, step % 64, size)
    decoded = torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)
    return decoded.view(rows, width, 4).float().mean(-1).div(64).to(device)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        batch = decode_batch(step, rows=512, width=64)
        loss = F.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
