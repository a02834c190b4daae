"""Hidden states of the whole run go into one tensor that is allocated at the start.

On a CPU its pages become resident as they are written: resident memory rises each step, and yet
nothing is allocated.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 36


def main():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(32, 128), nn.Tanh()).to(device)
    head = nn.Linear(128, 8).to(device)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-3)
    hidden_states = torch.empty(STEPS, 256, 128, device=device)
    for step in range(STEPS):
        x = torch.randn(256, 32, device=device)
        hidden = body(x)
        loss = F.cross_entropy(head(hidden), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hidden_states[step] = hidden.detach()
        if step % 12 == 11:
            drift = (hidden_states[step].mean(0) - hidden_states[0].mean(0)).norm().item()
            print(f"step {step + 1}: loss {loss.item():.3f}, drift {drift:.3f}")


if __name__ == "__main__":
    main()
