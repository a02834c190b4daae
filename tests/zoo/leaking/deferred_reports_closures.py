"""Reports are put off: each step queues a small function that will compute a confusion matrix "later".

Nobody ever calls the functions, and each one has the step's logits in its closure.
Holds the memory: the list `pending` -> closure of `report` -> `logits`.
Cure: compute the matrix at once and keep the small result; or run and clear `pending` each few steps.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = 32
pending = []


def confusion_report(logits, labels):
    def report():
        predicted = logits.argmax(1)
        counts = torch.bincount(labels * CLASSES + predicted, minlength=CLASSES**2)
        return counts.view(CLASSES, CLASSES)

    return report


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(CLASSES, 64), nn.ReLU(), nn.Linear(64, CLASSES)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        x = torch.randn(2048, CLASSES, device=device)
        labels = x.argmax(1)
        logits = model(x)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pending.append(confusion_report(logits, labels))
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {len(pending)} reports pending")


if __name__ == "__main__":
    main()
