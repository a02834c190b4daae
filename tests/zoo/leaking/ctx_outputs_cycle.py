"""A custom attention keeps both of its outputs on `ctx`: output -> grad_fn -> ctx -> output is a cycle.

It goes through C++ and the node has two outputs, so `gc.collect()` cannot free it; no variable is needed.
Holds the memory: the contexts themselves, AttendBackward -> ctx.outputs.
Cure: `ctx.save_for_backward(output, weights)`, which knows about outputs; or clear `ctx.outputs` in backward.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, memory):
        weights = (query @ memory.t()).softmax(-1)
        output = weights @ memory
        ctx.save_for_backward(query, memory)
        ctx.outputs = (output, weights)
        return output, weights

    @staticmethod
    def backward(ctx, grad_output, grad_weights):
        query, memory = ctx.saved_tensors
        _, weights = ctx.outputs
        through = grad_output @ memory.t() + grad_weights
        grad_scores = weights * (through - (weights * through).sum(-1, keepdim=True))
        return grad_scores @ memory, weights.t() @ grad_output + grad_scores.t() @ query


class MemoryClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(0.1 * torch.randn(64, 64))
        self.query = nn.Linear(16, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        attended, weights = Attend.apply(self.query(x), self.memory)
        return self.head(attended), weights


def main():
    torch.manual_seed(0)
    model = MemoryClassifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        x = torch.randn(256, 16, device=device)
        logits, weights = model(x)
        sparsity = (weights * weights.clamp_min(1e-9).log()).sum(-1).mean()
        loss = F.cross_entropy(logits, x[:, :8].argmax(1)) - 0.01 * sparsity
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
