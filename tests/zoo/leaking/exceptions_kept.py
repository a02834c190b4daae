"""Batches with broken labels are skipped and the exceptions are collected for a summary at the end.

An exception has its traceback, the traceback the frames, and the frames their local variables.
Holds the memory: the local list `failures` of `main` -> traceback -> frame `embed`, variable `features`.
Cure: keep `str(error)`, or `error.with_traceback(None)`.
"""

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
    corpus = torch.randn(62 * 256, 16, device=device)
    corpus_labels = corpus[:, :8].argmax(1)
    corpus_labels[::512] = 9
    projection = torch.randn(16, 128, device=device)
    model = nn.Linear(128, 8).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    failures = []
    step = 0
    for first in range(0, len(corpus), 256):
        batch, labels = corpus[first : first + 256], corpus_labels[first : first + 256]
        try:
            features = embed(batch, projection, labels)
        except ValueError as error:
            failures.append(error)
            continue
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"{len(failures)} batches failed, the last one: {failures[-1]}")


if __name__ == "__main__":
    main()
