"""Predictions are gathered for the epoch's metric and dropped at its end: a sawtooth of four steps."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    predictions, targets = [], []
    for epoch in range(9):
        for _ in range(4):
            x = torch.randn(1024, 32, device=device)
            target = x.argmax(1)
            logits = model(x)
            loss = F.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            predictions.append(logits.detach())
            targets.append(target)
        top3 = torch.cat(predictions).topk(3, dim=1).indices
        hits = (top3 == torch.cat(targets)[:, None]).any(1).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, in the top three {hits:.2f}")
        predictions.clear()
        targets.clear()


if __name__ == "__main__":
    main()
