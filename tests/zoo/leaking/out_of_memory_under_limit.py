"""A feature bank keeps a tensor a step, under a memory limit that the script sets itself, until it dies.

On a CPU the limit is the address space (`RLIMIT_AS`), on a GPU the allowed fraction of the device. The
request that fails is a large temporary of the forward pass; what filled the memory is the bank.
Holds the memory: the attribute `features` of `FeatureBank`.
Cure: bound the bank (keep the last n), or move old features to disk.
"""

import resource

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
MIB = 1 << 20


def limit_memory(headroom):
    """Allows `headroom` bytes more than are in use now."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + headroom) / total)
    else:
        with open("/proc/self/statm") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (in_use + headroom, hard))


class FeatureBank:
    def __init__(self):
        self.features = []

    def add(self, features):
        self.features.append(features)


def train(model, optimizer, bank, steps):
    for step in range(1, steps + 1):
        x = torch.rand(2048, 64, device=device)
        hidden = torch.tanh(model[0](x))  # 16 MiB
        loss = F.mse_loss(model[1](hidden), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bank.add(hidden.detach()[:, :512].contiguous())
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.Linear(2048, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    limit_memory(headroom=400 * MIB)
    train(model, optimizer, FeatureBank(), steps=120)


if __name__ == "__main__":
    main()
