"""Prompt tuning: each task brings a new prompt that is added to the optimizer and never taken out again.

Holds the memory: the optimizer's `param_groups`.
Cure: one optimizer a task, or remove the group (`optimizer.param_groups.pop()`) when the task is done.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for task in range(1, 31):
        prompt = nn.Parameter(0.02 * torch.randn(512, 64, device=device))
        optimizer.add_param_group({"params": [prompt], "lr": 1.0})
        offset = torch.rand(64, device=device)
        loss = F.mse_loss(model(prompt + offset), offset.expand(512, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if task % 10 == 0:
            print(f"task {task}: loss {loss.item():.4f}, {len(optimizer.param_groups)} groups")


if __name__ == "__main__":
    main()
