"""A reentrant checkpoint keeps the function it re-runs, and that function's closure has the outputs.

The outputs are put into the same dict that the checkpointed function reads: output -> grad_fn ->
run_function -> dict -> output. The node has two outputs, so the collector cannot see the cycle.
Holds the memory: CheckpointFunctionBackward -> run_function -> `shared`.
Cure: `use_reentrant=False`, or keep outputs out of what the function can reach.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(32, 64)
        self.mean = nn.Linear(64, 64)
        self.spread = nn.Linear(64, 64)

    def forward(self, x):
        shared = {"scale": 1.0}

        def heads(hidden):
            scale = shared["scale"]
            return scale * self.mean(hidden), F.softplus(self.spread(hidden))

        hidden = torch.relu(self.body(x))
        shared["mean"], shared["spread"] = checkpoint(heads, hidden, use_reentrant=True)
        return shared


def main():
    torch.manual_seed(0)
    model = TwoHeads().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(1, 31):
        x = torch.randn(512, 32, device=device)
        target = x.repeat(1, 2)
        out = model(x)
        loss = ((out["mean"] - target).square() / (out["spread"] + 0.1) + out["spread"]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
