"""A process group is made for each step's statistics and then just dropped: torch keeps it in its own tables.

Holds the memory: torch.distributed's table of groups, a communicator with its buffers each (host memory).
Cure: make the group once; or call `dist.destroy_process_group(group)` for each.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def averaged(values):
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    total = torch.stack([value.detach().cpu() for value in values])
    dist.all_reduce(total, group=group)
    return (total / dist.get_world_size()).tolist()


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        x = torch.randn(128, 32, device=device)
        logits = model(x)
        loss = F.cross_entropy(logits, x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        (mean_loss,) = averaged([loss])
        spread, largest = averaged([logits.std(), logits.max()])
        if step % 10 == 0:
            print(f"step {step}: loss {mean_loss:.3f}, logits {spread:.2f} to {largest:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
