"""Weights are quantized each step to a tensor subclass, and the quantized copies are all kept.

The subclass is a wrapper without a storage of its own: the bytes are in its inner tensors.
Holds the memory: `recorder.quantized` -> Int8Tensor -> `int_data`.
Cure: keep the last copy only, or compare and drop it.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Int8Tensor(torch.Tensor):
    @staticmethod
    def __new__(cls, int_data, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, int_data.shape, dtype=scale.dtype, device=int_data.device
        )

    def __init__(self, int_data, scale):
        self.int_data = int_data
        self.scale = scale

    @classmethod
    def from_float(cls, tensor):
        scale = tensor.abs().amax(dim=1, keepdim=True) / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["int_data", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, outer_size, outer_stride):
        return cls(inner["int_data"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.int_data.to(value.scale.dtype) * value.scale if isinstance(value, cls) else value

        return func(*(plain(arg) for arg in args), **(kwargs or {}))


class QuantizationRecorder:
    def __init__(self):
        self.quantized = []

    def record(self, weight):
        self.quantized.append(Int8Tensor.from_float(weight.detach()))
        return (self.quantized[-1] - weight.detach()).abs().max().item()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    recorder = QuantizationRecorder()
    for step in range(1, 31):
        x = torch.randn(32, 256, device=device)
        loss = F.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        error = recorder.record(model[0].weight)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, quantization error {error:.5f}")


if __name__ == "__main__":
    main()
