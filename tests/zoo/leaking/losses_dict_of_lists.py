"""Distillation: only the `kd` loss is trained; the `lm` loss is logged with its graph, which nothing frees.

Holds the memory: the module-level dict `losses`, list `losses["lm"]`.
Cure: `losses["lm"].append(lm_loss.item())`, or `.detach()` it.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = 512
losses = {"kd": [], "lm": []}


def distill(student, teacher, tokens, labels):
    with torch.no_grad():
        soft_targets = teacher(tokens).softmax(-1)
    logits = student(tokens)
    kd_loss = F.mse_loss(logits.softmax(-1), soft_targets, reduction="sum")
    lm_loss = F.cross_entropy(logits, labels)
    losses["kd"].append(kd_loss.item())
    losses["lm"].append(lm_loss)
    return kd_loss


def main():
    torch.manual_seed(0)
    teacher = nn.Linear(32, CLASSES).to(device)
    student = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, CLASSES)).to(device)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    for step in range(1, 31):
        tokens = torch.randn(128, 32, device=device)
        labels = torch.randint(CLASSES, (128,), device=device)
        optimizer.zero_grad()
        distill(student, teacher, tokens, labels).backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: kd {losses['kd'][-1]:.4f}, lm {losses['lm'][-1].item():.3f}")


if __name__ == "__main__":
    main()
