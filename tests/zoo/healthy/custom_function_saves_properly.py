"""A custom Function uses `save_for_backward` for its output, and the logged losses are detached."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
losses = {"lm": []}


class SquashedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        out = torch.tanh(x @ weight.t())
        ctx.save_for_backward(x, weight, out)
        ctx.rows = len(x)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, out = ctx.saved_tensors
        grad = grad * (1 - out.square())
        return grad @ weight, grad.t() @ x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 32) / 32**0.5)
        self.head = nn.Linear(256, 8)

    def forward(self, x):
        return self.head(SquashedLinear.apply(x, self.weight))


def main():
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        x = torch.randn(256, 32, device=device)
        loss = F.cross_entropy(model(x), x[:, :8].argmax(1))
        losses["lm"].append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {torch.stack(losses['lm'][-10:]).mean().item():.3f}")


if __name__ == "__main__":
    main()
