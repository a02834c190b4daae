"""Mixed precision with a gradient scaler, a moving average of the weights, and utilities with `device=`."""

import copy

import torch
from torch import nn


class Average(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        torch._foreach_lerp_(
            [each for each in self.module.state_dict().values() if each.is_floating_point()],
            [each for each in model.state_dict().values() if each.is_floating_point()],
            weight=1.0 - self.decay,
        )


def usage(device):
    free, total = torch.cuda.mem_get_info(device=device)
    stats = torch.cuda.memory_stats(device=device)
    return {
        "used": (total - free) / 2**20,
        "peak": stats["allocated_bytes.all.peak"] / 2**20,
        "allocated": torch.cuda.max_memory_allocated(device=device) / 2**20,
    }


def main():
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(
        nn.Conv2d(3, 48, 4, 4),
        nn.Flatten(2),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(48 * 64, 100),
    )
    model.to(device=device)
    average = Average(model, 0.999)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device=device.type)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).to(device=device)
    state = torch.cuda.get_rng_state(device=device)
    torch.cuda.set_rng_state(state, device=device)
    for step in range(500):
        x = torch.randn(32, 3, 32, 32).to(device, non_blocking=True)
        target = torch.randint(0, 100, (32,)).to(device, non_blocking=True)
        with torch.autocast(device_type=device.type, dtype=torch.float16):
            loss = criterion(model(x), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.cuda.synchronize(device=device)
        average.update(model)
        current = torch.cuda.current_stream(device=device)
        print(step, loss.item(), current.query(), usage(device))


if __name__ == "__main__":
    main()
