"""Activations are kept as 8-bit objects that are no tensors, only look like one (`_data`, `_scale_inv`).

Holds the memory: the local list `kept` of `main` -> Float8Activation -> `_data`.
Cure: drop them after use (`kept.clear()`), or keep the last few.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Float8Activation:
    """A quantized activation in the manner of transformer libraries: bytes and the inverse of a scale."""

    __slots__ = ("_data", "_scale_inv")

    def __init__(self, tensor):
        scale = 127 / tensor.abs().amax().clamp_min(1e-12)
        self._data = (tensor * scale).round().to(torch.int8)
        self._scale_inv = scale.reciprocal()

    def dequantize(self):
        return self._data.float() * self._scale_inv

    def nbytes(self):
        return self._data.nbytes + self._scale_inv.nbytes


def main():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 256), nn.ReLU()).to(device)
    head = nn.Linear(256, 16).to(device)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
    kept = []
    for step in range(1, 31):
        x = torch.randn(512, 64, device=device)
        hidden = body(x)
        kept.append(Float8Activation(hidden.detach()))
        loss = F.cross_entropy(head(hidden), x[:, :16].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            total = sum(activation.nbytes() for activation in kept)
            print(f"step {step}: loss {loss.item():.3f}, {total} bytes of 8-bit activations")


if __name__ == "__main__":
    main()
