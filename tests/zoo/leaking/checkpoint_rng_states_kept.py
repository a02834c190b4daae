"""Losses are kept after backward, and the blocks use reentrant checkpointing.

backward frees the saved tensors, but every checkpoint's context also keeps the state of the random number
generator (5 kB on the CPU), to be able to repeat dropout: sixteen blocks make 79 KiB per step.
Holds the memory: the local list `losses` of `main` -> ... -> CheckpointFunctionBackward -> ctx.fwd_cpu_state.
Cure: `losses.append(loss.item())`; or `use_reentrant=False`, or `preserve_rng_state=False`.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"


class DeepNet(nn.Module):
    def __init__(self, depth=16, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = DeepNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, 31):
        x = torch.randn(64, 32, device=device)
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        if step % 10 == 0:
            print(f"step {step}: loss {sum(losses[-10:]).item() / 10:.3f}")


if __name__ == "__main__":
    main()
