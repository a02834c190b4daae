"""Losses are kept after backward. The saved tensors are freed by then, the graph's nodes are not.

An unrolled network has thousands of nodes a step: no tensor of any size grows, the host's memory does.
Holds the memory: the local list `losses` of `main` (host memory: C++ nodes of the graph).
Cure: `losses.append(loss.item())`.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class UnrolledCell(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.update = nn.Linear(width, width)

    def forward(self, sequence):
        state = torch.zeros_like(sequence[0])
        for x in sequence:
            gate = torch.sigmoid(self.gate(x + state))
            state = gate * state + (1 - gate) * torch.tanh(self.update(x))
        return state


def main():
    torch.manual_seed(0)
    model = UnrolledCell().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(1, 31):
        sequence = torch.randn(96, 4, 8, device=device)
        loss = F.mse_loss(model(sequence), sequence[-8:].mean(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
        if step % 10 == 0:
            print(f"step {step}: loss {sum(losses[-10:]).item() / 10:.4f}")


if __name__ == "__main__":
    main()
