"""Every fifth step a held-out set is evaluated under `no_grad`, in one large batch, and reduced."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def evaluate(model, x, labels):
    model.eval()
    logits = model(x)
    model.train()
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 16)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    held_out = torch.randn(4096, 32, device=device)
    held_out_labels = held_out[:, :16].argmax(1)
    curve = []
    for step in range(1, 36):
        x = torch.randn(256, 32, device=device)
        loss = F.cross_entropy(model(x), x[:, :16].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            curve.append((step, *evaluate(model, held_out, held_out_labels)))
            print("step {}: held-out loss {:.3f}, accuracy {:.2f}".format(*curve[-1]))


if __name__ == "__main__":
    main()
