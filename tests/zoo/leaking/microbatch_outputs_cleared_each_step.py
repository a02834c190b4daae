"""Sixteen micro-batches a step: their logits are collected and only cleared when the step is complete.

From step to step nothing grows. Within a step 64 KiB stay for each micro-batch, so the number of
micro-batches is limited by memory, which is what gradient accumulation should avoid.
Holds the memory: the local list `step_logits` of `main`.
Cure: count correct predictions at once (`.item()`), and keep no logits.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
ACCUMULATE = 16


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step_logits, step_labels = [], []
    for step in range(1, 25):
        for _ in range(ACCUMULATE):
            x = torch.randn(256, 64, device=device)
            labels = x.argmax(1).to(torch.uint8)
            logits = model(x)
            loss = F.cross_entropy(logits, labels.long()) / ACCUMULATE
            loss.backward()
            step_logits.append(logits)
            step_labels.append(labels)
        optimizer.step()
        optimizer.zero_grad()
        correct = torch.cat(step_logits).argmax(1) == torch.cat(step_labels)
        if step % 8 == 0:
            print(f"step {step}: accuracy {correct.float().mean().item():.3f}")
        step_logits.clear()
        step_labels.clear()


if __name__ == "__main__":
    main()
