"""The outputs of each epoch are collected in a list, which goes, and joined into one tensor, which is kept.

Within an epoch the list grows as fast as memory does over the run; a cure of the list changes nothing.
Holds the memory: the list of joined tensors in main().
Cure: keep the last one only.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def run_epoch(model, optimizer, steps=24):
    collected = []
    for _ in range(steps):
        batch = torch.randn(128, 64, device=device)
        output = model(batch)
        loss = F.mse_loss(output, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        collected.append(output.detach())
    return torch.cat(collected)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    probe_epochs = []
    for epoch in range(30):
        probe_epochs.append(run_epoch(model, optimizer))
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: deviation {probe_epochs[-1].std().item():.4f}")


if __name__ == "__main__":
    main()
