"""Every parameter has an optimizer of its own, stepped by a hook as soon as its gradient is complete."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
    ).to(device)
    optimizers = {p: torch.optim.Adam([p], lr=1e-3, foreach=False) for p in model.parameters()}

    def step_parameter(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_parameter)

    for step in range(1, 31):
        x = torch.randn(128, 64, device=device)
        loss = F.cross_entropy(model(x), x[:, :8].argmax(1))
        loss.backward()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
