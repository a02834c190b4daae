"""Validation runs in `eval()` mode but not under `no_grad`; its predictions are kept, each with its graph.

Holds the memory: the local list `val_outputs` of `main` and the graphs below it.
Cure: `with torch.no_grad():` around validation; keep the argmax; clear the list.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(32, 256)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(256, 16)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.hidden(x))))


def main():
    torch.manual_seed(0)
    model = Classifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    held_out = torch.randn(256, 32, device=device)
    held_out_labels = held_out[:, :16].argmax(1)
    val_outputs = []
    for step in range(1, 31):
        model.train()
        x = torch.randn(64, 32, device=device)
        loss = F.cross_entropy(model(x), x[:, :16].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        model.eval()
        val_outputs.append(model(held_out))
        if step % 10 == 0:
            accuracy = (val_outputs[-1].argmax(1) == held_out_labels).float().mean().item()
            print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
