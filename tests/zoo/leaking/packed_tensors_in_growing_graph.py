"""Saved tensors are packed to bfloat16 to halve the memory, and the validation loss is summed with its graph.

The graph of every validation pass stays, with the packed copies in its nodes (a tensor that two nodes save is
packed twice).
Holds the memory: the local variable `validation_sum` of `main` -> ... -> packed tensors.
Cure: run validation under `torch.no_grad()`, or add `loss.item()`.
"""

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class HalfPrecisionSaver:
    def __init__(self, model):
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(self, tensor):
        if not tensor.is_floating_point() or tensor.untyped_storage().data_ptr() in self.weights:
            return tensor
        return tensor.to(torch.bfloat16), tensor.dtype

    def unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else packed[0].to(packed[1])


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    saver = HalfPrecisionSaver(model)
    held_out = torch.randn(256, 64, device=device)
    held_out_labels = held_out[:, :16].argmax(1)
    validation_sum = torch.zeros((), device=device)
    for step in range(1, 31):
        x = torch.randn(128, 64, device=device)
        with saved_tensors_hooks(saver.pack, saver.unpack):
            loss = F.cross_entropy(model(x), x[:, :16].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            validation_sum = validation_sum + F.cross_entropy(model(held_out), held_out_labels)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, validation {validation_sum.item() / step:.3f}")


if __name__ == "__main__":
    main()
