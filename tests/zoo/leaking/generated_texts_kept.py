"""Samples of a character model are decoded to text after each step, and all of the text is kept.

Holds the memory: the local list `samples` of `main`, Python strings (host memory).
Cure: write samples to a file, or keep only the last few.
"""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,\n\"'"


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), 16)
        self.head = nn.Linear(16, len(ALPHABET))

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def decode(tokens):
    return "".join(ALPHABET[index] for index in tokens)


@torch.no_grad()
def sample(model, rows, length):
    tokens = torch.randint(len(ALPHABET), (rows, length), device=device)
    return [decode(row) for row in model(tokens).argmax(-1).tolist()]


def main():
    torch.manual_seed(0)
    model = CharModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    samples = []
    for step in range(1, 31):
        tokens = torch.randint(len(ALPHABET), (64, 33), device=device)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples.extend(sample(model, rows=64, length=2048))
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, sample {samples[-1][:12]!r}")


if __name__ == "__main__":
    main()
