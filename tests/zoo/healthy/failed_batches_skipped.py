"""Every third batch has a broken label: the exception is caught, its message counted, the batch skipped."""

from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def embed(documents, projection, labels):
    features = torch.sin(documents @ projection)
    if int(labels.max()) >= 8:
        raise ValueError(f"label {int(labels.max())} out of range")
    return features


def main():
    torch.manual_seed(0)
    projection = torch.randn(16, 128, device=device)
    model = nn.Linear(128, 8).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    failures = Counter()
    step = 0
    for number in range(48):
        batch = torch.randn(256, 16, device=device)
        labels = batch[:, :8].argmax(1)
        if number % 3 == 2:
            labels[0] = 9
        try:
            features = embed(batch, projection, labels)
        except ValueError as error:
            failures[str(error)] += 1
            continue
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 8 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {failures.total()} batches skipped")


if __name__ == "__main__":
    main()
