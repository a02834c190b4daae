"""A logging function has a list as its default argument, which is one and the same list for all calls.

Holds the memory: the default argument `store` of the function `log`.
Cure: `store=None` and a list made by the caller; keep numbers, not tensors.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def log(step, errors, store=[]):
    store.append(errors)
    if step % 10 == 0:
        print(f"step {step}: error {errors.mean().item():.4f}, first was {store[0].mean().item():.4f}")


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        x = torch.rand(768, 32, device=device)
        output = model(x)
        loss = F.mse_loss(output, x.square())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(step, (output.detach() - x.square()).abs())


if __name__ == "__main__":
    main()
