"""The loss of every token is appended to a list at module level, one vector of 16,384 floats a step.

Holds the memory: the module-level list `losses`.
Cure: append `loss.mean().item()` (or a detached summary), or clear the list after it has been reported.
"""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

VOCABULARY, BATCH, LENGTH = 48, 32, 512

model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Tanh(), nn.Linear(16, VOCABULARY)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []

for step in range(30):
    start = torch.randint(VOCABULARY, (BATCH, 1), device=device)
    tokens = (start + torch.arange(LENGTH + 1, device=device)) % VOCABULARY
    logits = model(tokens[:, :-1])
    token_loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses.append(token_loss)

    optimizer.zero_grad(set_to_none=True)
    token_loss.mean().backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {losses[-1].mean().item():.3f}")
