"""A depth network's outputs are collected before they are detached; only copies made later are.

Holds the memory: the local list `outs` of `run_epoch`, a dict of two scales for each batch.
Cure: append detached outputs, or just the metrics.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, 8, 3, padding=1)
        self.depth = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, image):
        inverse_depth = self.depth(F.elu(self.features(image))).sigmoid()
        return {"full": inverse_depth, "half": F.avg_pool2d(inverse_depth, 2)}


def run_epoch(model, optimizer, batches):
    outs = []
    for number in range(1, batches + 1):
        image = torch.rand(16, 3, 48, 48, device=device)
        grey = image.mean(1, keepdim=True)
        out = model(image)
        loss = F.l1_loss(out["full"], grey) + F.l1_loss(out["half"], F.avg_pool2d(grey, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outs.append(out)
        detached = {scale: value.detach() for scale, value in out.items()}
        if number % 10 == 0:
            print(f"batch {number}: loss {loss.item():.4f}, mean {detached['full'].mean().item():.3f}")
    return sum(out["full"].mean().item() for out in outs) / len(outs)


def main():
    torch.manual_seed(0)
    model = DepthNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    print(f"mean inverse depth {run_epoch(model, optimizer, batches=30):.3f}")


if __name__ == "__main__":
    main()
