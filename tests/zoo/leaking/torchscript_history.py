"""A TorchScript module appends its features to a `list[Tensor]` attribute.

The list lives in C++: no Python object refers to these tensors, and Python's collector never sees them.
Holds the memory: the attribute `history` of the scripted module, in C++.
Cure: keep one tensor attribute that is overwritten, or clear the list in a scripted method.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class FeatureBank(nn.Module):
    history: list[torch.Tensor]

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 64)
        self.history = []

    def forward(self, x):
        features = torch.tanh(self.project(x))
        self.history.append(features.detach() * 1.0)
        return features


def main():
    torch.manual_seed(0)
    bank = torch.jit.script(FeatureBank().to(device))
    head = nn.Linear(64, 4).to(device)
    optimizer = torch.optim.Adam([*bank.parameters(), *head.parameters()], lr=1e-2)
    for step in range(1, 31):
        x = torch.randn(512, 32, device=device)
        loss = F.cross_entropy(head(bank(x)), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
