"""A recurrent state is carried on with its graph; `retain_graph=True` silences autograd's complaint.

The outputs of a call come from the same nodes as its last state, and lie closer to most of them.
Holds the memory: the local variable `state` of `main`.
Cure: `state = state.detach()` before the next call.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(64, 64)

    def forward(self, x, state):
        states = [state]
        for t in range(x.shape[1]):
            states.append(torch.tanh(self.mix(states[-1]) + x[:, t]))
        return torch.stack(states[1:], 1), states[-1]


def main():
    torch.manual_seed(0)
    model, head = Recurrent().to(device), nn.Linear(64, 8).to(device)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-2)
    state = torch.zeros(128, 64, device=device)
    for step in range(1, 41):
        outputs, state = model(torch.randn(128, 6, 64, device=device), state)
        loss = F.cross_entropy(head(outputs[:, -1]), torch.randint(8, (128,), device=device))
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
