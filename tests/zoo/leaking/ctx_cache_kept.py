"""A message-passing kernel puts what backward needs on `ctx.backward_cache` instead of saving it.

backward frees saved tensors, but not attributes: as long as a loss is referenced, so is the cache.
Holds the memory: the list `epoch_losses` -> ... -> MessagePassingBackward -> ctx.backward_cache.
Cure: `ctx.save_for_backward(...)`, or clear the cache in backward; and keep `loss.item()`.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class MessagePassing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, adjacency):
        degree = adjacency.sum(1, keepdim=True).clamp_min(1.0)
        normalized = features / degree
        ctx.backward_cache = (adjacency, degree, normalized)
        return torch.tanh(adjacency @ normalized)

    @staticmethod
    def backward(ctx, grad):
        adjacency, degree, normalized = ctx.backward_cache
        grad = grad * (1 - torch.tanh(adjacency @ normalized).square())
        return (adjacency.t() @ grad) / degree, None


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 128)
        self.classify = nn.Linear(128, 4)

    def forward(self, nodes, adjacency):
        return self.classify(MessagePassing.apply(self.project(nodes), adjacency))


def main():
    torch.manual_seed(0)
    model = GraphNet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    adjacency = (torch.rand(256, 256, device=device) < 0.05).float()
    epoch_losses = []
    for step in range(1, 31):
        nodes = torch.randn(256, 32, device=device)
        labels = (adjacency @ nodes)[:, :4].argmax(1)
        loss = F.cross_entropy(model(nodes, adjacency), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_losses.append(loss)
        if step % 10 == 0:
            print(f"step {step}: loss {torch.stack(epoch_losses[-10:]).mean().item():.3f}")


if __name__ == "__main__":
    main()
