"""A hand-written recomputation keeps its detached inputs in a list; each keeps its `.grad` as well.

Holds the memory: the attribute `segment_inputs` of `Segment`, every leaf and the leaf's gradient.
Cure: `segment_inputs.pop()` when the segment has been recomputed, and `.grad = None` after harvesting.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Segment:
    """Runs a module without a graph, and again with one when the gradient of its output has come."""

    def __init__(self, module):
        self.module = module
        self.segment_inputs = []

    def forward(self, x):
        leaf = x.detach().requires_grad_()
        self.segment_inputs.append(leaf)
        with torch.no_grad():
            return self.module(leaf)

    def backward(self, grad_output):
        leaf = self.segment_inputs[-1]
        self.module(leaf).backward(grad_output)
        return leaf.grad


def main():
    torch.manual_seed(0)
    stem = nn.Linear(16, 96).to(device)
    segment = Segment(nn.Sequential(nn.Linear(96, 96), nn.Tanh()).to(device))
    head = nn.Linear(96, 8).to(device)
    parameters = [*stem.parameters(), *segment.module.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(1, 31):
        x = torch.randn(256, 16, device=device)
        stem_out = stem(x)
        hidden = segment.forward(stem_out).requires_grad_()
        loss = F.cross_entropy(head(hidden), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        stem_out.backward(segment.backward(hidden.grad))
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
