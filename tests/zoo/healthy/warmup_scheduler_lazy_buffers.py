"""Warm-up, gradient clipping, a lazily built layer and a buffer made at step 6: one-off rises."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Whitened(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(256)
        self.out = nn.Linear(256, 16)
        self.register_buffer("projection", None)

    def make_projection(self):
        self.projection = torch.linalg.qr(torch.randn(256, 256, device=device)).Q

    def forward(self, x):
        x = torch.relu(self.layer(x))
        return self.out(x if self.projection is None else x @ self.projection)


def main():
    torch.manual_seed(0)
    model = Whitened().to(device)
    model(torch.randn(2, 48, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=8)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[8])
    for step in range(1, 33):
        if step == 6:
            model.make_projection()
        x = torch.randn(128, 48, device=device)
        loss = F.cross_entropy(model(x), x[:, :16].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 8 == 0:
            (rate,) = scheduler.get_last_lr()
            print(f"step {step}: loss {loss.item():.3f}, |g| {norm.item():.2f}, lr {rate:.5f}")


if __name__ == "__main__":
    main()
