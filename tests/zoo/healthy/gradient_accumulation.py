"""Four micro-batches a step: gradients appear with the first one and stay until `zero_grad`."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
ACCUMULATE = 4


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, running = 0, 0.0
    for number in range(30 * ACCUMULATE):
        x = torch.rand(64, 128, device=device)
        loss = F.mse_loss(model(x), x.roll(1, dims=1)) / ACCUMULATE
        loss.backward()
        running += loss.item()
        if (number + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 10 == 0:
                print(f"step {step}: loss {running:.4f}")
            running = 0.0


if __name__ == "__main__":
    main()
