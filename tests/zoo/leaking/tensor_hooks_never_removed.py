"""Each step masks the gradient of a weight through a new tensor hook; the old hooks are never removed.

Holds the memory: the weight's hooks, each with its own mask of 64 KiB in the closure of `apply_mask`.
Cure: keep the handle that `register_hook` returns and call `remove()` on it after backward.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def mask_gradient(weight, keep):
    mask = (torch.rand_like(weight) < keep).float()

    def apply_mask(gradient):
        return gradient * mask

    weight.register_hook(apply_mask)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, 31):
        mask_gradient(model[0].weight, keep=0.98)
        x = torch.rand(64, 128, device=device)
        loss = F.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
