"""A recurrent kernel keeps its cell states on `ctx.c`: neither input nor output, but needed for backward.

The loss is summed up over the epoch, so every step's contexts, one per layer, stay alive.
Holds the memory: `total_loss` of `main` -> ... -> SimpleRecurrenceBackward -> ctx.c.
Cure: `ctx.save_for_backward(c)`; and sum up `loss.item()`.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class SimpleRecurrence(torch.autograd.Function):
    """c[t] = f * c[t-1] + (1 - f) * x[t], with one forget gate f per channel; the output is tanh(c)."""

    @staticmethod
    def forward(ctx, x, forget):
        c = torch.empty_like(x)
        state = torch.zeros_like(x[0])
        for t in range(len(x)):
            state = forget * state + (1 - forget) * x[t]
            c[t] = state
        ctx.c = c
        ctx.save_for_backward(x, forget)
        return torch.tanh(c)

    @staticmethod
    def backward(ctx, grad):
        x, forget = ctx.saved_tensors
        grad_c = grad * (1 - torch.tanh(ctx.c).square())
        grad_x, grad_forget = torch.empty_like(x), torch.zeros_like(forget)
        carry = torch.zeros_like(x[0])
        for t in reversed(range(len(x))):
            carry = carry + grad_c[t]
            before = ctx.c[t - 1] if t else torch.zeros_like(carry)
            grad_x[t] = carry * (1 - forget)
            grad_forget += (carry * (before - x[t])).sum(0)
            carry = carry * forget
        return grad_x, grad_forget


class Tagger(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.project = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.gates = nn.ParameterList([nn.Parameter(torch.zeros(width)) for _ in range(2)])

    def forward(self, x):
        for project, gate in zip(self.project, self.gates, strict=True):
            x = SimpleRecurrence.apply(project(x), gate.sigmoid())
        return x


def main():
    torch.manual_seed(0)
    model = Tagger().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    total_loss = torch.zeros((), device=device)
    for step in range(1, 31):
        sequence = torch.randn(32, 16, 64, device=device)
        loss = F.mse_loss(model(sequence), sequence.cumsum(0).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss = total_loss + loss
        if step % 10 == 0:
            print(f"step {step}: mean loss {total_loss.item() / step:.4f}")


if __name__ == "__main__":
    main()
