"""Model and optimizer are made from a checkpoint on the device; gradients are accumulated."""

import pathlib
import sys

import torch
from torch import nn

file = pathlib.Path(sys.argv[1]) / "resumed.pt"
device = "cuda"


def network():
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))


if not file.exists():
    model = network()
    torch.save({"arguments": {"hidden": 512}, "model": model.state_dict(), "iteration": 3}, file)

checkpoint = torch.load(file, map_location=device, weights_only=True)
model = network()
model.load_state_dict({name.removeprefix("_orig_mod."): each for name, each in checkpoint["model"].items()})
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
checkpoint = None  # frees what was loaded
scaler = torch.amp.GradScaler("cuda", enabled=False)
x = torch.randn(64, 256).pin_memory().to(device, non_blocking=True)
for iteration in range(3, 600):
    for _ in range(8):
        with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
            loss = (model(x) - x).square().mean() / 8
        x = torch.randn(64, 256).pin_memory().to(device, non_blocking=True)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(iteration, loss.item() * 8)
